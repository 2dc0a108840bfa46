"""Look at a run: find it, watch it, read its logs, say why it failed, ask its model."""
