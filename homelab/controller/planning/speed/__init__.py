"""How fast a training is, before it runs."""
