"""`homelab track` and `homelab tensorboard`: the curves of a run for trackers and viewers."""
