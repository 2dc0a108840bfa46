"""`homelab chat`: questions to the model of a run."""
