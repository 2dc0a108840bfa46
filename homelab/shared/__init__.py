"""What the three programs have in common: `protocol/` (what they agree on) and `law/` (what they compute alike). Shipped to the nodes."""
