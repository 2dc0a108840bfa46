"""Checks of what is trained: model, data, and whether it fits."""
