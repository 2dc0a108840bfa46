"""How one training is spread over ranks."""
