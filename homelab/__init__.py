"""homelab turns unequal machines on a home network into one trainer.

This package is also shipped to the nodes, so it imports nothing here.
"""

__version__ = "0.1.0"
