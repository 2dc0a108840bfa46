"""`homelab status`, `logs`, `why` and `runs`: look at a run."""
