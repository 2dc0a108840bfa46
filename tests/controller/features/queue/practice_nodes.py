"""Nodes and runs without machines, for the runner: they outlive it, as real ones do. `kill_at` ends the process at its next moments."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.queue.job_work import MachineError, NotYetError
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queue_run import QueueRun, Times
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.queue.turns import SeenRun
from homelab.controller.run.state import State

NIGHT = 1_780_000_000.0 - 1_780_000_000.0 % 86400 + 22 * 3600  # 22:00, UTC
STEPS = 3


class Killed(BaseException):
    """SIGKILL: nothing is tidied up."""


@dataclass
class PracticeRun:
    """`started`: on all nodes; a run that was cut short is on some."""

    job: int
    nodes: tuple[str, ...]
    state: State = "running"
    started: bool = False
    supervised: bool = False
    step: int = 0
    is_by_hand: bool = False


@dataclass
class PracticeNodes:
    """`fates`: number -> how its training goes: done (by default), failed, refused, broken (the node's fault), or late (not before the second try)."""

    names: tuple[str, ...] = ("a", "b")
    fates: dict[int, str] = field(default_factory=dict)
    runs: dict[str, PracticeRun] = field(default_factory=dict)
    sent: set[str] = field(default_factory=set)
    now: float = NIGHT
    kill_at: list[int] = field(default_factory=list)
    step_s: float = 5.0
    saves_every: int = 1
    said: list[str] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    has_lost_a_node: bool = False
    settles: Callable[[], None] = lambda: None

    def moment(self) -> None:
        """One at which the process may be killed."""
        if self.kill_at:
            self.kill_at[0] -= 1
            if self.kill_at[0] <= 0:
                self.kill_at.pop(0)
                raise Killed

    def alive(self, job: int) -> list[PracticeRun]:
        return [run for run in self.runs.values() if run.job == job and run.state == "running"]

    def tick(self, seconds: float) -> None:
        """Time passes, with the runner or without."""
        self.now += seconds
        assert self.now < NIGHT + 20 * 86400, "it waits for ever"
        for run in self.runs.values():
            if run.state == "running" and run.started:
                run.step += 1
                fate = self.fates.get(run.job, "done")
                if run.step >= STEPS or fate != "done":
                    run.state = (
                        "done" if fate in ("done", "late") and run.step >= STEPS else "running" if fate in ("done", "late") else "failed"
                    )

    # what the runner asks for

    def every(self) -> tuple[str, ...]:
        return self.names

    def busy(self, job: QueuedJob) -> str:
        nodes = job.needs(self.names)
        taken = [run for run in self.runs.values() if run.state == "running" and set(run.nodes) & set(nodes)]
        return f"a run of job {taken[0].job} is there" if taken else ""

    def launch(self, job: QueuedJob, named: Callable[[str], None], refuse_held: Callable[[], None]) -> None:
        fate = self.fates.get(job.number, "done")
        if fate == "late" and job.number not in self.late:
            self.late.add(job.number)
            raise NotYetError("somebody plays a game on a", where="node a", hint="wait")
        if fate == "refused":
            raise HomelabError("rank 0 on a lacks 3.1 GB", where="recipe", hint="smaller batch")
        if fate == "broken":
            raise MachineError(HomelabError("the disk is full", where="node a", hint="make room"), "a")
        self.settles()
        refuse_held()
        name = f"run-{job.number}-{len(self.runs) + len(self.sent)}"
        named(name)
        self.moment()
        self.sent.add(name)
        self.moment()
        run = self.runs[name] = PracticeRun(job.number, job.needs(self.names))
        assert len(self.alive(job.number)) == 1, "it runs twice"
        self.moment()
        run.started = True
        self.launched.append(job.number)
        self.moment()
        run.supervised = True

    def resume(self, job: QueuedJob) -> None:
        run = self.runs[job.run]
        assert run.state == "stopped" and run.is_by_hand
        self.moment()
        run.state, run.is_by_hand = "running", False
        self.moment()
        run.supervised = True

    def look(self, job: QueuedJob) -> SeenRun | None:
        if not self.was_sent(job):
            return None
        run = self.runs.get(job.run)
        if run is None:
            return SeenRun("shipping", False, is_cut_short=True)
        is_over = run.state in ("done", "failed", "stopped")
        return SeenRun(
            run.state, is_over, run.supervised and not is_over, run.supervised and is_over, run.is_by_hand,
            is_cut_short=run.state == "running" and not run.started, step=run.step,
            checkpoints=tuple(range(0, run.step + 1, self.saves_every))[1:], because="it ended" if run.state == "failed" else "",
        )  # fmt: skip

    def was_sent(self, job: QueuedJob) -> bool:
        return job.run in self.sent

    def forget(self, job: QueuedJob) -> None: ...

    def supervise(self, job: QueuedJob) -> None:
        self.moment()
        self.runs[job.run].supervised = True

    def stop(self, job: QueuedJob, *, everywhere: bool = True) -> bool:
        run = self.runs.get(job.run)
        self.moment()
        if run is not None and run.state == "running":
            run.state, run.is_by_hand = "stopped", True
        self.moment()
        return not (everywhere and self.has_lost_a_node)

    def is_over(self, run: str) -> bool:
        return True

    def runner(self, queue: QueueFolder, **fields: Any) -> QueueRun:
        """A new process that runs this queue."""
        return QueueRun(queue, self, self.said.append, times=Times(lambda: self.now, lambda: self.now, self.tick), **fields)


@contextmanager
def renames_counted(nodes: PracticeNodes) -> Iterator[None]:
    """Each rename is a moment before it and one behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # the machine goes on
        for name in ("rename", "replace"):
            real = getattr(os, name)

            def counted(source: Any, target: Any, real: Callable[[Any, Any], None] = real) -> None:
                nodes.moment()
                real(source, target)
                nodes.moment()

            patch.setattr(os, name, counted)
        yield


def job(number: int = 1, **fields: Any) -> QueuedJob:
    return QueuedJob(number=number, recipe=f"/recipes/{number}.toml", text="", added_at=NIGHT, **fields)


def filled(queue: QueueFolder, *jobs: QueuedJob) -> QueueFolder:
    """These jobs wait; their numbers are given by the queue."""
    queue.add(lambda first: [one.model_copy(update={"number": first + place}) for place, one in enumerate(jobs)])
    return queue
