"""All cases, in the order in which they are played."""

from __future__ import annotations

from benchmarks.faults import deaths, disks, outside
from benchmarks.faults.scene import Case

ALL: tuple[Case, ...] = (*deaths.CASES, *outside.CASES, *disks.CASES)
