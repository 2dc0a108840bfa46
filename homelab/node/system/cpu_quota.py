"""How many CPUs this process may really use: the machine's, its affinity, and the quota of its cgroup."""

from __future__ import annotations

import math
import os

from homelab.shared.protocol import files


def usable_cpus() -> int:
    """Whole CPUs, at least 1: a container or a slice with half a core gains nothing from a second thread."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    quota = _quota()
    return max(1, min(count, math.ceil(quota - 0.05))) if quota else count


def _quota() -> float | None:
    """CPUs allowed by the cgroup of this process (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), None without a limit."""
    quotas = []
    for controllers, path in control_groups():
        if "cpu" in controllers.split(","):
            quotas.append(_v1(path))
        elif controllers == "":
            quotas.append(_v2(path))
    return min((limit for limit in quotas if limit), default=None)


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
