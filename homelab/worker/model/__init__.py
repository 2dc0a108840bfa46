"""The model that is trained, and what it computes with."""
