"""Which rank computes how much, from measured speeds."""
