"""One run, a worker of which is killed in each of many attempts: what its supervisor and its nodes hold must not grow from one to the next.

Every other attempt is killed while the processes of the next one wait, the ones between before they do: a run begins again in both ways.
At the end it is compared with an undisturbed run, as every soak is.
"""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.faults import soak
from benchmarks.faults.footprint import footprint, grown, too_much
from benchmarks.faults.ground import STEPS_PER_EPOCH
from benchmarks.faults.prepared import ready
from benchmarks.faults.scene import Unexpected
from benchmarks.faults.soak import Soak

from homelab.lab import procfs

FIRST_STEPS = 2  # of an attempt: then all of its ranks have begun
STEPS = 20  # of an attempt, where every other one waits for the processes of the next; measured 10 to 18, with the soak's slow steps
BEGINS_S = 180.0  # an attempt, on a machine that computes for others too
WAITS_S = 120.0


def main(kills: int, seed: int, json_file: Path | None, keep: Path | None) -> int:
    """Kill a worker in each of the first `kills` attempts. Returns 0 when nothing was lost, and nothing grew."""

    def in_a_row(played: Soak) -> None:
        for number in range(kills):
            _kill_one(played, prepared=number % 2 == 1)
        played.wait(BEGINS_S, lambda: _has_begun(played))
        played.footprints.extend(footprint(played.run, played.ground.lab))
        played.why.extend(too_much(grown(played.footprints)))
        played.wait(played.limit_s)

    return soak.run(in_a_row, max(2, round(kills * STEPS / STEPS_PER_EPOCH)), seed, kills * 60.0 + 600, json_file, keep)


def _kill_one(played: Soak, *, prepared: bool) -> None:
    """Raises Unexpected when no attempt begins, or the training is done before."""
    attempt = played.run.attempt()
    played.wait(BEGINS_S, lambda: _has_begun(played))
    if prepared:
        processes = played.ground.lab.processes_of_run
        played.wait(WAITS_S, lambda: len(ready(processes(played.run.name))) == len(played.place.names()))
    if played.is_over():
        raise Unexpected(f"the training was done in attempt {attempt}")
    played.footprints.extend(footprint(played.run, played.ground.lab))
    node, pids = played.place.workers()
    played.tell(f"a worker is killed{', the next attempt is prepared' if prepared else ''}", node, played.step())
    procfs.send(pids, signal.SIGKILL)
    played.wait(BEGINS_S, lambda: played.run.attempt() > attempt)


def _has_begun(played: Soak) -> bool:
    attempt = played.run.attempt()
    return played.step() >= played.run.plan(attempt).get("resume_step", 0) + FIRST_STEPS
