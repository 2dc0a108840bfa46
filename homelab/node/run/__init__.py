"""One attempt on this node: torchrun, its status, its end."""
