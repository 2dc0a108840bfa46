"""The check that torchrun on all nodes joins and computes the right sums."""
