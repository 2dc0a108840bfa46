"""homelab turns unequal machines on a home network into one trainer.

This package is also shipped to the nodes, so it imports nothing here.
"""

__version__ = "0.2.0"
__distribution__ = "homelab-trainer"
"""The name that pip knows. "homelab" on PyPI is another program, so nothing of ours may have pip look that name up."""
