"""What a supervisor decides. Pure."""
