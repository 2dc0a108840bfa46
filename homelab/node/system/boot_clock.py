"""Moments by the clock of this boot, which runs through sleep and never jumps. Those of another boot are infinitely long ago."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from homelab.shared.protocol import files

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def boot_id() -> str:
    """The id of this boot. It changes with every boot: a pid from before a power cut means nothing."""
    return files.text("/proc/sys/kernel/random/boot_id")


def now() -> JsonObject:
    """This moment, as `passed_s` reads it."""
    return {"at_s": clock_s(), "boot_id": boot_id()}


def clock_s() -> float:
    """Seconds of this machine's clock that runs through sleep."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def passed_s(entry: JsonObject) -> float:
    """Seconds since the moment in `entry`; infinite for one of another boot, or a damaged one."""
    at_s = entry.get("at_s")
    if not isinstance(at_s, (int, float)) or entry.get("boot_id") != boot_id():
        return float("inf")
    return max(0.0, clock_s() - at_s)
