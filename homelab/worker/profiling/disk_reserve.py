"""Room for a raw trace, looked for before it is written: other ranks and the training itself write to the same disk, and shall not find it full."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

RESERVE_BYTES = 256 << 20
"""Stays free for the training while the profile is written."""
EVENT_BYTES = 500
"""Of an event in Chrome's format, with its arguments; 250 to 350 were measured. The packed trace is a tenth of it."""


def check(folder: Path, events: int) -> None:
    """Raises OSError (ENOSPC) where the disk of `folder`, which is there, has no room for the trace of so many events and the reserve."""
    needed_bytes = events * EVENT_BYTES + RESERVE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {free_bytes / 1e6:.0f} MB are free, and {needed_bytes / 1e6:.0f} MB are wanted",
            str(folder),
        )
