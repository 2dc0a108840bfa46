"""Whose turn it is, and what is next for a job that trains: from what lies in the queue and what was seen of a run. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from homelab.controller.base.units import listed
from homelab.controller.features.queue import hours
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.run.state import State as RunState

# A node that ended so many jobs by a fault of its own gets no other one before a person has looked.
FAULTS = 2
_OF_US = "its run was stopped for the hour"


@dataclass(frozen=True)
class Listing:
    """The jobs by their folders, those that wait in their order. `resumed_at`: when a person let the queue go on last; `damaged`: files that cannot be read."""

    waiting: tuple[QueuedJob, ...] = ()
    running: tuple[QueuedJob, ...] = ()
    done: tuple[QueuedJob, ...] = ()
    failed: tuple[QueuedJob, ...] = ()
    is_paused: bool = False
    resumed_at: float = 0.0
    damaged: tuple[str, ...] = ()

    @property
    def jobs(self) -> tuple[QueuedJob, ...]:
        """All of them: what trains, what waits, what is over."""
        return (*self.running, *self.waiting, *sorted((*self.done, *self.failed), key=lambda job: job.number))

    @property
    def over(self) -> set[int]:
        """The numbers of those of which nothing more is done."""
        return {job.number for job in (*self.done, *self.failed)}

    def with_number(self, number: int) -> QueuedJob | None:
        """The job of this number."""
        return next((job for job in self.jobs if job.number == number), None)


@dataclass(frozen=True)
class Clock:
    """What the rules need beside the jobs: the time, since 1970, all nodes of the cluster, and whether a run that is not of this queue is over."""

    now: float
    every: tuple[str, ...]
    is_over: Callable[[str], bool] = lambda run: True


def waits(listing: Listing, clock: Clock) -> dict[int, str]:
    """Number of a job that waits -> why; empty for one whose turn it is, as far as the queue knows.

    A job whose hour has come keeps its nodes: no later job takes one of them before it.
    """
    faulty, reasons = faulty_nodes(listing, clock.every), {}
    taken = {node: f"job {job.number} trains on {node}" for job in listing.running for node in job.needs(clock.every)}
    for job in listing.waiting:
        nodes = job.needs(clock.every)
        because = _held(listing, job, clock) or next((faulty[node] for node in nodes if node in faulty), "")
        if not because:
            because = next((taken[node] for node in nodes if node in taken), "")
            taken = {**{node: f"job {job.number} is before it on {node}" for node in nodes}, **taken}
        reasons[job.number] = because
    return reasons


def rests(listing: Listing, clock: Clock) -> bool:
    """Whether nothing trains, and nothing begins before an hour comes or a person acts: the night is over, or the queue is empty."""
    faulty, left = faulty_nodes(listing, clock.every), {str(job.number) for job in listing.waiting}
    return not listing.running and all(
        listing.is_paused
        or job.after in left
        or not hours.is_open(job, clock.now)
        or any(node in faulty for node in job.needs(clock.every))
        for job in listing.waiting
    )


def _held(listing: Listing, job: QueuedJob, clock: Clock) -> str:
    if listing.is_paused:
        return "the queue is paused"
    # However it ended: a job that failed stops no other. A number that is no job's any more was removed.
    left = {str(other.number) for other in (*listing.waiting, *listing.running)}
    if job.after and (job.after in left if job.after.isdecimal() else not clock.is_over(job.after)):
        return f"after {'job ' if job.after.isdecimal() else ''}{job.after}"
    if not hours.is_open(job, clock.now):
        return f"not before {job.not_before}"
    return ""


def faulty_nodes(listing: Listing, every: Sequence[str]) -> dict[str, str]:
    """Node -> why no job goes there: its own faults have ended several, and none has got through since, nor has a person let the queue go on."""
    ended: dict[str, list[int]] = defaultdict(list)
    well = {node: job.ended_at for job in sorted(listing.done, key=lambda job: job.ended_at) for node in job.needs(tuple(every))}
    for job in listing.failed:
        if job.machine and job.ended_at > max(listing.resumed_at, well.get(job.machine, 0.0)):
            ended[job.machine].append(job.number)
    return {
        node: f"{node} has failed in jobs {listed(map(str, sorted(numbers)))}" for node, numbers in ended.items() if len(numbers) >= FAULTS
    }


@dataclass(frozen=True)
class SeenRun:
    """What was seen of a job's run. `is_owned`: its supervisor works, or a command does. `has_said_its_end`: its supervisor has left it, or it has none.

    `is_cut_short`: some of its nodes, which answer, never began the attempt. `because`: why it failed; `machine`: whose fault that was.
    """

    state: RunState
    is_over: bool
    is_owned: bool = False
    has_said_its_end: bool = False
    is_stopped_by_hand: bool = False
    is_cut_short: bool = False
    step: int = 0
    checkpoints: tuple[int, ...] = ()
    because: str = ""
    machine: str = ""


@dataclass(frozen=True)
class Act:
    """What is next for a job that trains. `back`: it waits again; `stop`: its hour is over; `supervise`: nobody looks after its run; `clear`: what of it
    was started is stopped, then it waits again."""

    kind: Literal["follow", "supervise", "stop", "clear", "back", "done", "failed"]
    because: str = ""
    machine: str = ""
    keeps_run: bool = False


def next_act(job: QueuedJob, seen: SeenRun | None, now: float, *, is_supervised: bool = True) -> Act:
    """`seen`: None if nothing of its run was ever sent to a node. `is_supervised`: a run gets a supervisor."""
    if seen is None:
        return Act("back", "its launch was cut off")
    if seen.state == "done":
        return Act("done")
    if seen.state == "stopped" and (seen.is_stopped_by_hand or (seen.is_over and seen.has_said_its_end)):
        return Act("back", _OF_US, keeps_run=True) if job.is_stopping else Act("failed", "stopped by hand")
    if job.stop_at and not hours.is_open(job, now):
        return Act("stop", f"it is {job.stop_at}")
    if seen.is_owned:
        return Act("follow")
    if seen.state in ("failed", "lost"):
        if is_supervised and not seen.has_said_its_end:
            return Act("supervise")
        return Act("failed", seen.because or f"its run is {seen.state}", seen.machine) if seen.is_over else Act("follow")
    if seen.is_cut_short:
        return Act("clear", "its start was cut off", keeps_run=seen.step > 0)
    return Act("supervise" if is_supervised and seen.state != "stopping" and not seen.has_said_its_end else "follow")


def sweep_is_over(listing: Listing, sweep: int) -> tuple[str, ...]:
    """The runs of a sweep that are done, if none of its jobs is left to train."""
    left = [job for job in (*listing.waiting, *listing.running) if job.sweep == sweep]
    return () if left or not sweep else tuple(job.run for job in sorted(listing.done, key=lambda job: job.number) if job.sweep == sweep)


@dataclass(frozen=True)
class Expected:
    """When a job begins and ends if nothing fails, since 1970; None where nobody knows."""

    begins: float | None
    ends: float | None


def expected(listing: Listing, clock: Clock) -> Mapping[int, Expected]:
    """Number -> when it begins and ends, by the plans, in the order in which they are now."""
    free: dict[str, float | None] = {}  # node -> when it has no job any more; None: nobody knows
    found: dict[int, Expected] = {}
    for job in listing.running:
        begins = job.began_at or clock.now
        ends = None if job.seconds is None else max(clock.now, _end(job, begins, job.seconds - job.trained_s))
        found[job.number] = Expected(begins, ends)
        free |= dict.fromkeys(job.needs(clock.every), ends)
    left = {str(job.number) for job in listing.waiting}
    for job in sorted(listing.waiting, key=lambda job: hours.opens(job, clock.now)):  # one whose hour is far away keeps no node until then
        moments = [clock.now, *(free.get(node, clock.now) for node in job.needs(clock.every))]
        if job.after:
            before = found.get(int(job.after)) if job.after.isdecimal() else None
            moments.append(before.ends if before else clock.now if job.after.isdecimal() and job.after not in left else None)
        known = [moment for moment in moments if moment is not None]
        start = hours.opens(job, max(known)) if len(known) == len(moments) else None
        ends = None if start is None or job.seconds is None else _end(job, start, job.seconds - job.trained_s)
        found[job.number] = Expected(start, ends)
        free |= dict.fromkeys(job.needs(clock.every), ends)
    return found


def _end(job: QueuedJob, begins: float, left: float) -> float:
    """The end of so many seconds of training, night by night."""
    left = max(0.0, left)
    for _ in range(1000):
        closes = hours.closes(job, begins)
        if closes is None or begins + left <= closes:
            break
        left -= closes - begins
        begins = hours.opens(job, closes)
    return begins + left
