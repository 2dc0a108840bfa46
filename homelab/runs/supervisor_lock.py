"""The lock of a run's supervisor: at most one on this machine, and none is left behind by a process that dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from homelab.errors import HomelabError
from homelab.protocol import lock
from homelab.runs import store
from homelab.runs.paths import RunPaths


@contextmanager
def held(paths: RunPaths) -> Iterator[bool]:
    """True when the lock is ours inside the block, False when somebody else has it. The kernel drops it with its holder.

    A holder keeps its lock when the run's folder is deleted: a new file is another lock.

    Raises HomelabError where there cannot be one.
    """
    file = paths.supervisor_lock
    try:
        # Not blocking, because the file may be a named pipe.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise HomelabError(f"the lock of this run cannot be had: {error.strerror}", where=str(file), hint=store.fix(file, error)) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield _holder_of_deleted(paths) is None
    finally:
        os.close(descriptor)


def is_held(paths: RunPaths) -> bool:
    """Whether a process supervises this run on this machine."""
    return lock.is_held(paths.supervisor_lock) or _holder_of_deleted(paths) is not None


def _holder_of_deleted(paths: RunPaths) -> int | None:
    """The process that has a deleted lock of this run open (proc_pid_fd(5)), for as long as it does; None where none has."""
    lock_file = f"{os.path.realpath(paths.root)}/{paths.supervisor_lock.name} (deleted)"
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and b"homelab" in _command_line(name) and lock_file in _open_files(name):
            return int(name)
    return None


def _command_line(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read()
    except OSError:
        return b""


def _open_files(pid: str) -> Iterator[str]:
    """Of a process of another user: nothing."""
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        with suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{number}")
