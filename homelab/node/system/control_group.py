"""The limits of the control groups of this process: memory and processors that it may use of the machine's (cgroups(7))."""

from __future__ import annotations

import math
import os

from homelab.node.system import utilisation
from homelab.shared.protocol import files


def available_bytes() -> int:
    """Memory that the programs of this node can still have; a very large number where that is not known."""
    _, free = utilisation.memory()
    limit, used = memory()
    known = [free, None if limit is None or used is None else limit - used]
    return min((value for value in known if value is not None), default=1 << 62)


def memory(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> tuple[int | None, int | None]:
    """(limit, used) in bytes of the control group that leaves this process the least room, of its own and all above; (None, None)
    without a limit. What the kernel can drop does not count as used: pages of files that no program has mapped, recently used ones too, as in
    MemAvailable of /proc/meminfo. A program that has ended leaves the libraries that it had read."""
    limits = []
    for controllers, path in control_groups(groups):
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


def usable_cpus() -> int:
    """Whole CPUs, at least 1: a container or a slice with half a core gains nothing from a second thread."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    # CPUs allowed by the cgroup of this process (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), None without a limit.
    quotas = []
    for controllers, path in control_groups():
        if "cpu" in controllers.split(","):
            quotas.append(_v1(path))
        elif controllers == "":
            quotas.append(_v2(path))
    quota = min((limit for limit in quotas if limit), default=None)
    return max(1, min(count, math.ceil(quota - 0.05))) if quota else count


def control_groups(file: str = "/proc/self/cgroup") -> list[tuple[str, str]]:
    """(controllers, path) of each control group of this process (cgroups(7)); the one of v2 names no controllers."""
    lines = (line.split(":", 2) for line in files.text(file).splitlines())
    return [(line[1], line[2]) for line in lines if len(line) == 3]


def _v1(path: str) -> float | None:
    for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
        folder = root + path
        quota, period = files.integer(folder + "/cpu.cfs_quota_us"), files.integer(folder + "/cpu.cfs_period_us")
        if quota and quota > 0 and period:
            return quota / period
    return None


def _v2(path: str) -> float | None:
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        quota, _, period = files.text(root + path.rstrip("/") + "/cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            return int(quota) / int(period)
    return None
