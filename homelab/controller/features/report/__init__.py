"""`homelab report` and `homelab compare`: a run as one value, and that value as one HTML file."""
