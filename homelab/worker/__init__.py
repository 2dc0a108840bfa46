"""The training program that torchrun starts on every GPU. Shipped to the nodes: it imports nothing else of homelab."""

import os

# The hub's library would name the software of this node in each of its requests.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
