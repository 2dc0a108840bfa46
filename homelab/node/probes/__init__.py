"""Probes: one file a subject. `read(request)` gives the field of `homelab.controller.facts.node.Facts` that has the name of its file."""
