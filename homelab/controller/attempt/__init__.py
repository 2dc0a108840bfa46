"""One start of a run on its nodes: inputs, plan, ranks, and whether they are alive."""
