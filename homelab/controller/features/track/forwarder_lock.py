"""One process at a time sends a run to a tracker; the kernel drops its lock with it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths


@contextmanager
def held(paths: RunPaths, tracker: str) -> Iterator[bool]:
    """True when it is ours inside the block, False when another process has it. Raises HomelabError where there cannot be one."""
    file = paths.tracking / f".{tracker}.lock"
    with store.disk_errors_as_hints(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
