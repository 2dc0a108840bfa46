"""The same worker environment on every node: `homelab setup` and `homelab teardown`."""
