"""`homelab wake`: machines that sleep, and how they are woken."""
