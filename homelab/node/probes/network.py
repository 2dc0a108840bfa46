"""Interfaces, routes, the node's own name, the rendezvous port, its firewall, and whether Windows stands before it."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from homelab.node.system import firewall, ports
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """The node's places on its networks."""
    facts = {
        "interfaces": ports.interfaces(),
        "own_name_addresses": ports.own_name_addresses(),
        "routes": ports.routes(request.get("peers") or []),
        "port": ports.state(int(request["port"]), ports.promised(request["workdir"], request["node"])) if request.get("port") else None,
        "wsl": wsl(),
    }
    facts.update(firewall.look())
    return facts


def wsl(osrelease: str = "/proc/sys/kernel/osrelease", interfaces: str = "/sys/class/net") -> str | None:
    """How a WSL2 reaches the network: what its `wslinfo` says ("nat", "mirrored", ...), else by its interfaces. None elsewhere."""
    if "microsoft" not in files.text(osrelease).lower():
        return None
    program = shutil.which("wslinfo")
    if program is not None:
        try:
            completed = subprocess.run([program, "--networking-mode"], capture_output=True, text=True, timeout=5)
            if completed.returncode == 0 and completed.stdout.strip():
                return completed.stdout.split()[0].lower()
        except (OSError, subprocess.TimeoutExpired):
            pass
    # Mirrored mode brings an interface of this name along.
    return "mirrored" if os.path.exists(os.path.join(interfaces, "loopback0")) else "nat"
