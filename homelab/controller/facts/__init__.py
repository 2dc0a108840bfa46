"""What nodes answer, with types."""
