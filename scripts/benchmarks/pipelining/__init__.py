"""What `scripts/bench pipeline` runs: on the nodes, and around them."""
