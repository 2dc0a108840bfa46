"""Which machines could be nodes, and what cluster.toml says of them then: pure. What asks them is `homelab.control.discovery`."""
