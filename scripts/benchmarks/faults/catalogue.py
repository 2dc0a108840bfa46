"""All cases, in the order in which they are played."""

from __future__ import annotations

from benchmarks.faults import deaths, disks, looked_at, outside, prepared, throttles, together, told
from benchmarks.faults.scene import Case

ALL: tuple[Case, ...] = (
    *deaths.CASES,
    *outside.CASES,
    *disks.CASES,
    *throttles.CASES,
    *told.CASES,
    *together.CASES,
    *looked_at.CASES,
    *prepared.CASES,
)

# The most telling ones, a quarter of a minute each: for every change of the code.
FAST = ("worker-killed", "power-cut", "worker-frozen", "checkpoint-bit", "two-at-once", "out-of-memory")
FAST_LENGTH = (12, 20)  # epochs of 20 steps, steps between checkpoints
