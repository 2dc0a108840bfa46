"""How long a step takes, the wire included, and the start before it."""
