"""What can be asked of a node, one file per probe: `read(request)` returns the field of `homelab.facts.node.Facts` that has the name of the file. Standard library only."""
