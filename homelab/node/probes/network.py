"""Interfaces, routes, the node's own name, the rendezvous port, its firewall, and whether Windows stands before it."""

import os
import shutil
import subprocess

from homelab.node import firewall, ports


def read(request):
    """The node's places on its networks."""
    facts = {
        "interfaces": ports.interfaces(),
        "own_name_addresses": ports.own_name_addresses(),
        "routes": ports.routes(request.get("peers") or []),
        "port": ports.state(int(request["port"])) if request.get("port") else None,
        "wsl": wsl(),
    }
    facts.update(firewall.look())
    return facts


def wsl(osrelease="/proc/sys/kernel/osrelease", interfaces="/sys/class/net"):
    """How a WSL2 reaches the network: what its `wslinfo` says ("nat", "mirrored", ...), else by its interfaces. None elsewhere."""
    try:
        with open(osrelease) as stream:
            if "microsoft" not in stream.read().lower():
                return None
    except OSError:
        return None
    program = shutil.which("wslinfo")
    if program is not None:
        try:
            done = subprocess.run([program, "--networking-mode"], capture_output=True, text=True, timeout=5)
            if done.returncode == 0 and done.stdout.strip():
                return done.stdout.split()[0].lower()
        except (OSError, subprocess.TimeoutExpired):
            pass
    # Mirrored mode brings an interface of this name along.
    return "mirrored" if os.path.exists(os.path.join(interfaces, "loopback0")) else "nat"
