"""Follow a run and recover it without a person."""
