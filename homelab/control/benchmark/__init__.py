"""Running a suite: each cell a run of the product, one after the other, and what is kept of it."""
