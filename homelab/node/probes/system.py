"""The machine itself: who we are on it, its clock, processors and memory."""

import getpass
import os
import platform
import socket
import time

from homelab.node import load, quota


def read(request):
    """Host name, user, system, clock, cores, load, memory."""
    total, available = load.memory()
    limit, used = control_group_memory()
    return {
        "time": time.time(),
        "hostname": socket.gethostname(),
        "user": _user(),
        "home": os.path.expanduser("~"),
        "system": "%s %s" % (_distribution(), platform.machine()),
        "cpu_count": quota.usable_cpus(),
        "load_1min": os.getloadavg()[0],
        "memory_total_bytes": total,
        "memory_available_bytes": available,
        "memory_limit_bytes": limit,
        "memory_limit_used_bytes": used,
    }


def _user():
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return str(os.getuid())


def _distribution():
    try:
        with open("/etc/os-release") as stream:
            for line in stream:
                if line.startswith("PRETTY_NAME="):
                    return line.split("=", 1)[1].strip().strip('"')
    except OSError:
        pass
    return platform.system()


def control_group_memory(groups="/proc/self/cgroup", root="/sys/fs/cgroup"):
    """(limit, used) in bytes of the control group that leaves this process the least room, of its own and all above; (None, None)
    without a limit. What the kernel can drop (pages of files that were not used lately) does not count as used."""
    try:
        with open(groups) as stream:
            lines = [line.strip().split(":", 2) for line in stream]
    except OSError:
        return None, None
    found = []
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if "memory" in controllers.split(","):
            found += _limits(
                root + "/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
        elif controllers == "":
            for place in (root, root + "/unified"):
                found += _limits(place, path, "memory.max", "memory.current", "inactive_file")
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, None))


def _limits(root, path, limit_name, used_name, droppable_name):
    """Those of a group and of all above it. v1 writes a number near 2^63 where there is no limit, v2 the word "max"."""
    found = []
    while True:
        folder = root + path.rstrip("/")
        limit = _integer(folder + "/" + limit_name)
        if limit is not None and limit < 1 << 60:
            used = _integer(folder + "/" + used_name) or 0
            found.append((limit, max(0, used - _stat(folder + "/memory.stat", droppable_name))))
        if path in ("", "/"):
            return found
        path = os.path.dirname(path)


def _integer(file):
    try:
        with open(file) as stream:
            return int(stream.read())
    except (OSError, ValueError):
        return None


def _stat(file, name):
    try:
        with open(file) as stream:
            for line in stream:
                if line.startswith(name + " "):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
