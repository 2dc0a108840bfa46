"""`homelab launch`: preflight, plan, the run folder, torchrun on every node."""
