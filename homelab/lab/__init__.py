"""The practice cluster: several nodes on one machine, with real sshd."""

from homelab.lab.lab import Lab

__all__ = ["Lab"]
