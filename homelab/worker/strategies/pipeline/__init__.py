"""One model on several ranks: each holds some of its layers, and only activations go from one to the next."""
