"""`homelab new`: from a data file and a model to a recipe, each value with its reason."""
