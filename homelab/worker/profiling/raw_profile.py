"""What a rank leaves for the process that sums its profile up: two files in a folder that is not whole yet."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESERVE_BYTES = 256 << 20  # stays free: other ranks and the training itself write to the same disk while the profile is written
EVENT_BYTES = 500  # of an event in Chrome's format, with its arguments; 250 to 350 were measured. The packed trace is a tenth of it.
TRACE = "trace.json"
MEASURED = "measured.json"

_NO_ROOM = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), os.strerror(errno.EFBIG))


@dataclass(frozen=True)
class RawProfile:
    """What was measured beside the trace. Times are Unix nanoseconds.

    `held_bytes`: before the first of the steps, on a processor; `usual_step_s`: of steps that were not profiled, None where there was none;
    `steps`: "step", "begin_ns", "ready_ns" (the last gradient of this rank), "end_ns", "step_s", "communication_s";
    `exchanges`: see `homelab.worker.profiling.exchange_log`; `modules`: path -> [class, "file:line"].
    """

    run: str
    attempt: int
    rank: int
    node: str
    device: str
    strategy: str
    world_size: int
    torch: str
    held_bytes: int
    usual_step_s: float | None
    steps: list[dict[str, Any]]
    exchanges: list[dict[str, Any]]
    modules: dict[str, Any]


def is_no_room(words: str) -> bool:
    """Whether these words say that a file could not grow."""
    return any(reason in words for reason in _NO_ROOM)


def check_room(folder: Path, events: int) -> None:
    """Raises OSError (ENOSPC) where the disk of `folder`, which is there, has no room for the trace of so many events and the reserve."""
    needed_bytes = events * EVENT_BYTES + RESERVE_BYTES
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(
            errno.ENOSPC,
            f"{os.strerror(errno.ENOSPC)}: {free_bytes / 1e6:.0f} MB are free, and {needed_bytes / 1e6:.0f} MB are needed",
            str(folder),
        )
