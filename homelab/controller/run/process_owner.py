"""The process that owns a record, and whether it still runs. A pid alone is not enough: the kernel may have given it to another process."""

from __future__ import annotations

import functools
import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

_HUNDREDTHS = 100
# The kernels tell the time of the boot by the wall clock, in whole seconds or after it was set. No pid comes round so soon.
_SAME_HUNDREDTHS = 60 * _HUNDREDTHS


def mark() -> dict[str, Any]:
    """This process: pid, when it was born (hundredths of a second since the boot), the boot, and the namespace in which the pid counts."""
    return {"pid": os.getpid(), "born": _born(os.getpid()), "boot_id": _boot_id(), "namespace": _namespace()}


def is_dead(record: Mapping[str, Any]) -> bool:
    """Whether the process of a mark is gone for sure. False for one of another machine, or of a damaged mark: this machine cannot tell."""
    pid, born = record.get("pid"), record.get("born")
    if not isinstance(pid, int) or not isinstance(born, int) or not _boot_id():
        return False
    if (record.get("boot_id"), record.get("namespace")) != (_boot_id(), _namespace()):
        return False
    return not _is_same(pid, born)


def lives_here(record: Mapping[str, Any]) -> bool:
    """Whether the process of a mark runs on this machine now."""
    born = record.get("born")
    return isinstance(born, int) and record.get("boot_id") == _boot_id() != "" and _is_same(record.get("pid"), born)


def is_stopped(pid: Any) -> bool:
    """Whether a process of this machine waits for SIGCONT, or for a debugger."""
    try:
        return psutil.Process(int(pid)).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OverflowError, ValueError, TypeError):
        return False


def age_s() -> float:
    """For how long this process has run."""
    if sys.platform == "linux":  # by the clock that nobody sets
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - (_born(os.getpid()) or 0) / _HUNDREDTHS)
    return max(0.0, time.time() - psutil.Process().create_time())


def name() -> str:
    """For people who are to find it: user, machine and process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user} on {socket.gethostname()}, process {os.getpid()}"


def _is_same(pid: Any, born: int) -> bool:
    now = _born(pid)
    return now is not None and abs(now - born) < _SAME_HUNDREDTHS


def _born(pid: Any) -> int | None:
    """Hundredths of a second between the boot and the start of a process, None for who is gone or only waits to be buried."""
    try:
        process = psutil.Process(int(pid))
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        since_boot_s: float = process.create_time() - psutil.boot_time()
        return round(since_boot_s * _HUNDREDTHS)
    except (psutil.Error, OverflowError, ValueError, TypeError):
        return None


def _boot_id() -> str:
    """One boot of one machine; "" where the system has no name for it."""
    if sys.platform == "linux":
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
    return _session_uuid()


@functools.cache
def _session_uuid() -> str:
    """The name that macOS gives a boot (sysctl(8), kern.bootsessionuuid)."""
    if sys.platform != "darwin":
        return ""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _namespace() -> str:
    """Containers of Linux share the boot, and not the pids."""
    if sys.platform == "linux":
        try:
            return os.readlink("/proc/self/ns/pid")
        except OSError:
            return ""
    return ""
