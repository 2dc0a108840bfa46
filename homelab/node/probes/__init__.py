"""What can be asked of a node, one subject a file: `read(request)` returns fields of `homelab.facts.Facts`. Standard library only."""
