"""The clock of this machine that runs through sleep and never jumps: a laptop that was closed for the night is eight hours older."""

from __future__ import annotations

import time

# CLOCK_MONOTONIC stands still in sleep on Linux, and goes on on macOS (clock_gettime(3) of both).
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now_s() -> float:
    """Seconds since a moment that stays the same as long as the machine runs."""
    return time.clock_gettime(_CLOCK)
