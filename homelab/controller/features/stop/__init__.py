"""`homelab stop` and `homelab prune`: end a run, and everything of it."""
