"""Ctrl-C during work that must be done whole: it waits until the block is over, and counts then."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C (SIGINT) inside the block is raised as KeyboardInterrupt at its end, unless the block itself raises.

    For steps that leave something running on a node when they are cut short, and for the clean-up after such a cut: people
    press Ctrl-C twice. Blocks nest; outside of the main thread, where no signal arrives, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came and sys.stderr.isatty():
            sys.stderr.write("\ninterrupted: one moment, nothing is left half done\n")
        came = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
