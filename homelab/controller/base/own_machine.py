"""Commands for the terminal of the machine that homelab runs on: Linux (WSL2 is one) and macOS have other ones for the network. Pure but for sys.platform."""

from __future__ import annotations

import shlex
import sys

_SYSTEMS = {"linux": "Linux", "darwin": "macOS", "win32": "Windows", "cygwin": "Cygwin"}


def is_linux() -> bool:
    """Whether this machine can be a node or hold practice nodes."""
    return sys.platform == "linux"


def system() -> str:
    """Its system, for people."""
    return _SYSTEMS.get(sys.platform, sys.platform)


def route_to(host: str) -> str:
    """Shows the way to an address."""
    return f"ip route get {shlex.quote(host)}" if is_linux() else f"route -n get {shlex.quote(host)}"


def look_up(name: str) -> str:
    """Asks the system for the address of a name."""
    return f"getent hosts {shlex.quote(name)}" if is_linux() else f"dscacheutil -q host -a name {shlex.quote(name)}"


def own_network() -> str:
    """Shows addresses and routes."""
    return "ip -br address; ip route" if is_linux() else "ifconfig; netstat -rn"
