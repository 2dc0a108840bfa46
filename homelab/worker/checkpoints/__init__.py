"""Save a training and go on from it."""
