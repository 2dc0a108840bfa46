"""The machine itself: the user, its clock, processors and memory."""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import TYPE_CHECKING

from homelab.node.probes import upgrades
from homelab.node.system import cpu_quota, utilisation
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """Host name, user, system, clock, cores, load, memory."""
    total, available = utilisation.memory()
    limit, used = control_group_memory()
    return {
        "time": time.time(),
        "hostname": socket.gethostname(),
        "user": upgrades.user_name(),
        "home": os.path.expanduser("~"),
        "os": f"{_distribution()} {platform.machine()}",
        "cpu_count": cpu_quota.usable_cpus(),
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


def control_group_memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> tuple[int | None, int | None]:
    """(limit, used) in bytes of the control group that leaves this process the least room, of its own and all above; (None, None)
    without a limit. What the kernel can drop does not count as used: pages of files that no program has mapped, recently used ones too, as in
    MemAvailable of /proc/meminfo. A program that has ended leaves the libraries that it had read."""
    limits = []
    for controllers, path in cpu_quota.control_groups(groups):
        if "memory" in controllers.split(","):
            limits += _limits(root + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif controllers == "":
            for place in (root, root + "/unified"):
                limits += _limits(place, path, "memory.max", "memory.current", "")
    return min(limits, key=lambda pair: pair[0] - pair[1], default=(None, None))


def _limits(root: str, path: str, limit_name: str, used_name: str, prefix: str) -> list[tuple[int, int]]:
    """Those of a group and of all above it. v1 writes a number near 2^63 where there is no limit, v2 the word "max"."""
    limits = []
    while True:
        folder = root + path.rstrip("/")
        limit = files.integer(folder + "/" + limit_name)
        if limit is not None and limit < 1 << 60:
            used = files.integer(folder + "/" + used_name) or 0
            limits.append((limit, max(0, used - _droppable(folder + "/memory.stat", prefix))))
        if path in ("", "/"):
            return limits
        path = os.path.dirname(path)


def _droppable(file: str, prefix: str) -> int:
    """Bytes of file pages that are not mapped. `prefix`: "total_" in v1, where the same without it is of the group without its children."""
    values = {}
    for line in files.text(file).splitlines():
        key, _, value = line.partition(" ")
        if value.isdigit():
            values[key] = int(value)
    inactive, active = (values.get(prefix + name, 0) for name in ("inactive_file", "active_file"))
    mapped = values.get("total_mapped_file", 0) if prefix else values.get("file_mapped", 0)
    return max(inactive, inactive + active - mapped)
