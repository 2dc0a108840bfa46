"""`homelab preflight`: ask the nodes everything that the checks judge."""
