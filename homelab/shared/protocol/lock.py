"""Locks of files that end with the process that holds them (flock(2))."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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


@contextlib.contextmanager
def without_waiting(path: AnyPath, *, shared: bool = False) -> Iterator[bool]:
    """Whether this process has the lock of a file in the block, alone or with all who share it. The file is made where it is not there. Raises OSError.

    A process that has the lock alone may remove the file. Another one that has it open by then does not get the lock: the next process makes a new file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            is_taken = os.fstat(descriptor).st_nlink > 0
        except BlockingIOError:
            is_taken = False
        yield is_taken
    finally:
        os.close(descriptor)


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
