"""How many CPUs this process may really use: the machine's, its affinity, and the quota of its cgroup."""

import math
import os


def usable_cpus():
    """Whole CPUs, at least 1: a container or a slice with half a core gains nothing from a second thread."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:
        count = os.cpu_count() or 1
    quota = _quota()
    return max(1, min(count, math.ceil(quota - 0.05))) if quota else count


def _quota():
    """CPUs allowed by the cgroup of this process (v2 `cpu.max`, v1 `cpu.cfs_quota_us`), None without a limit."""
    try:
        with open("/proc/self/cgroup") as stream:
            groups = [line.strip().split(":", 2) for line in stream]
    except OSError:
        return None
    found = []
    for _, controllers, path in groups:
        if "cpu" in controllers.split(","):
            found.append(_v1(path))
        elif controllers == "":
            found.append(_v2(path))
    limits = [limit for limit in found if limit]
    return min(limits) if limits else None


def _v1(path):
    for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
        folder = root + path
        quota, period = _number(folder + "/cpu.cfs_quota_us"), _number(folder + "/cpu.cfs_period_us")
        if quota and quota > 0 and period:
            return quota / period
    return None


def _v2(path):
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        try:
            with open(root + path.rstrip("/") + "/cpu.max") as stream:
                quota, period = stream.read().split()[:2]
            if quota != "max":
                return float(quota) / float(period)
        except (OSError, ValueError):
            continue
    return None


def _number(path):
    try:
        with open(path) as stream:
            return float(stream.read())
    except (OSError, ValueError):
        return None
