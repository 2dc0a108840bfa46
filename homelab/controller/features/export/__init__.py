"""`homelab export`: a training as a job of a scheduler."""
