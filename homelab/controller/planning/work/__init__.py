"""Which rank computes how much."""
