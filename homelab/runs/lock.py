"""The lock of a run's supervisor: at most one on this machine, and none is left behind by a process that dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from homelab.errors import HomelabError
from homelab.runs import store
from homelab.runs.paths import RunPaths


@contextmanager
def held(paths: RunPaths) -> Iterator[bool]:
    """True when the lock is ours inside the block, False when somebody else has it. The kernel drops it with its holder.

    Raises HomelabError where there cannot be one.
    """
    file = paths.supervisor_lock
    try:
        # Not blocking: somebody may have made a named pipe of it.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise HomelabError(f"the lock of this run cannot be had: {error.strerror}", where=str(file), hint=store.mend(file, error)) from error
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
        descriptor = os.open(paths.supervisor_lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
