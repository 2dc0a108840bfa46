"""The process that owns a record, and whether it still runs. A pid alone is not enough: the kernel may have given it to another process."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_IMPORTED_S = time.monotonic()


def mark() -> dict[str, Any]:
    """This process: pid, when it was born (ticks since the boot), the boot, and the namespace in which the pid counts."""
    return {"pid": os.getpid(), "born": _born(os.getpid()), "boot_id": _boot_id(), "namespace": _namespace()}


def is_dead(record: Mapping[str, Any]) -> bool:
    """Whether the process of a mark is gone for sure. False for one of another machine, or of a damaged mark: this machine cannot tell."""
    pid, born = record.get("pid"), record.get("born")
    if not isinstance(pid, int) or not isinstance(born, int) or not _boot_id():
        return False
    if (record.get("boot_id"), record.get("namespace")) != (_boot_id(), _namespace()):
        return False
    return _born(pid) != born


def lives_here(record: Mapping[str, Any]) -> bool:
    """Whether the process of a mark runs on this machine now."""
    return isinstance(record.get("born"), int) and record.get("boot_id") == _boot_id() != "" and _born(record.get("pid")) == record["born"]


def age_s() -> float:
    """For how long this process has run."""
    born = _born(os.getpid())
    if born is None or not hasattr(time, "CLOCK_BOOTTIME"):
        return time.monotonic() - _IMPORTED_S
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - born / os.sysconf("SC_CLK_TCK"))


def name() -> str:
    """For people who are to find it: user, machine and process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = str(os.getuid())
    return f"{user} on {socket.gethostname()}, process {os.getpid()}"


def _born(pid: Any) -> int | None:
    """Field 22 of proc_pid_stat(5), None for who is gone or only waits to be buried."""
    try:
        fields = (_PROC / str(int(pid)) / "stat").read_bytes().rsplit(b")", 1)[1].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError, TypeError):
        return None


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""
