"""`homelab supervise`: follow a run and recover it without a person."""
