"""Locks of files that end with the process that holds them (flock(2))."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.shared.protocol.files import AnyPath


def taken(descriptor: int, limit_s: float) -> bool:
    """Wait for the lock of an open file, but not longer: its holder may be stopped by a signal for ever. False if it is still held.

    The file has the pid of its holder then (`holder`), unless the disk is full.
    """
    until = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                return False
        time.sleep(0.02)
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return True


def holder(descriptor: int) -> int | None:
    """The pid of who has taken the lock of an open file; None where nobody has written one."""
    content = os.pread(descriptor, 32, 0).strip()
    return int(content) if content.isdigit() else None


def is_held(path: AnyPath) -> bool:
    """Whether a process holds the lock of this file; False when it cannot be opened. Probes by a shared lock: two that ask never refuse each other."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
