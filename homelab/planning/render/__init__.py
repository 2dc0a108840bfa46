"""A plan as tables."""
