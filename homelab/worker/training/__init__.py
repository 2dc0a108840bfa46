"""The training loop of one rank."""
