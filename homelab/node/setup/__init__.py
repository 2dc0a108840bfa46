"""The worker environment of this node: what is there, receiving its parts, making it, removing it."""
