"""The machine itself: the user, its clock, processors and memory."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import TYPE_CHECKING

from homelab.node.probes import upgrades
from homelab.node.system import control_group, utilisation
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """Host name, user, system, clock, cores, load, memory."""
    total, available = utilisation.memory()
    limit, used = control_group.memory()
    return {
        "time": time.time(),
        "hostname": socket.gethostname(),
        "user": upgrades.user_name(),
        "home": os.path.expanduser("~"),
        "os": f"{_distribution()} {platform.machine()}",
        "cpu_count": control_group.usable_cpus(),
        "load_1min": os.getloadavg()[0],
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "memory_limit_bytes": limit,
        "memory_limit_used_bytes": used,
    }


def _distribution() -> str:
    for line in files.text("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.split("=", 1)[1].strip().strip('"')
    return platform.system()
