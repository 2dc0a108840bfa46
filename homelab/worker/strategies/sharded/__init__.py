"""A model whose weights, gradients and optimizer are divided over the ranks (torch's `fully_shard`)."""
