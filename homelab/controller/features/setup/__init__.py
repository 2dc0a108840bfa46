"""`homelab setup` and `homelab teardown`: the same worker environment on every node."""
