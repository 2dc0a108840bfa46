"""The training program that torchrun starts on every GPU. Shipped to the nodes: it imports nothing else of homelab."""
