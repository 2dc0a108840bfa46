"""End a run, and everything of it."""
