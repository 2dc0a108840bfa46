"""`homelab recover`: examine, stop what is left, resume."""
