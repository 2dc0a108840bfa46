"""Whether training goes on after a fault, from the lines that the workers wrote step by step. Pure calculation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

# A step needs all ranks, so the workers that the fault has hit do at most the step they are in. If the same workers do steps later
# than this, the training has gone on without a restart (a cable that was put back in time).
IN_FLIGHT_S = 5.0


@dataclass(frozen=True)
class Step:
    """One step as one rank has done it; both times in seconds since 1970."""

    step: int
    ranks: int
    time: float
    started_at: float


@dataclass(frozen=True)
class GoesOn:
    """The first step after a fault: seconds since the fault, in how many ranks, whether in workers started since, and what their start took."""

    seconds: float
    step: int
    ranks: int
    new_workers: bool
    worker_start_s: float | None


def parse(text: str) -> list[Step]:
    """The lines of a steps.jsonl; one that a killed worker left unfinished is no line, wherever it stands."""
    parsed = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            parsed.append(Step(entry["step"], entry["ranks"], entry["time"], entry["started_at"]))
        except (ValueError, KeyError, TypeError):
            continue
    return parsed


def first_after(steps: Iterable[Step], fault_at: float) -> GoesOn | None:
    """The first step after the fault that shows that training goes on, None when there is none."""
    later = [one for one in steps if one.started_at > fault_at or one.time > fault_at + IN_FLIGHT_S]
    if not later:
        return None
    first = min(later, key=lambda one: one.time)
    new = first.started_at > fault_at
    return GoesOn(first.time - fault_at, first.step, first.ranks, new, first.time - first.started_at if new else None)
