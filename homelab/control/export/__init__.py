"""A training for a scheduler: its plan without machines, and its folder."""
