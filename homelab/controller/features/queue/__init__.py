"""`homelab queue`: jobs that are launched one after the other, by a folder and one runner."""
