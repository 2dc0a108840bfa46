"""The lock of a run's supervisor: at most one on this machine, and none is left behind by a process that dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from homelab.runs.paths import RunPaths


@contextmanager
def held(paths: RunPaths) -> Iterator[bool]:
    """True when the lock is ours inside the block, False when somebody else has it. The kernel drops it with its holder."""
    descriptor = os.open(paths.supervisor_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def is_held(paths: RunPaths) -> bool:
    """Whether somebody supervises this run on this machine. A shared lock: two that ask do not take each other for a supervisor."""
    try:
        descriptor = os.open(paths.supervisor_lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
