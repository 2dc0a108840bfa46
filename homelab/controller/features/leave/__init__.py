"""A node that its owner wants for something else: asked for by `homelab yield`."""
