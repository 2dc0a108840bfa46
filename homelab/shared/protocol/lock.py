"""Locks of files that end with the process that holds them (flock(2))."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.shared.protocol.files import AnyPath


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
