"""`homelab profile`: what the profiled steps of a run show."""
