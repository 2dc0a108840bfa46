"""The runner: it looks at the queue again and again, starts whose turn it is, and puts away what is over.

It knows nothing that is not on disk, but for how long it has waited: it may be killed between any two of its acts, and the next one goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Occasion
from homelab.controller.features.queue import hours, queue_list, turns
from homelab.controller.features.queue.job_work import MachineError, NotYetError
from homelab.controller.features.queue.queue_folder import QueueFolder
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.queue.turns import Act, Clock, SeenRun

_OF_THE_QUEUE = -1  # among what was told, which is by the number of the job
_BEGUN = ("shipping", "starting", "running")
LOOK_S = 5.0
AGAIN_S = 15.0  # nodes that were not free are asked again after so long
CHECKED_S = 120.0  # a start that was refused for now is tried again after so long: it costs every node a preflight
CHECKPOINT_S = 600.0  # so long after its hour a run is stopped wherever it is; until then at its next checkpoint


class NodeWork(Protocol):
    """What is done on the nodes: `job_work.JobWork`."""

    def every(self) -> tuple[str, ...]: ...
    def busy(self, job: QueuedJob) -> str: ...
    def launch(self, job: QueuedJob, named: Callable[[str], None], refuse_held: Callable[[], None]) -> None: ...
    def resume(self, job: QueuedJob) -> None: ...
    def look(self, job: QueuedJob) -> SeenRun | None: ...
    def forget(self, job: QueuedJob) -> None: ...
    def supervise(self, job: QueuedJob) -> None: ...
    def stop(self, job: QueuedJob, *, everywhere: bool = True) -> bool: ...
    def is_over(self, run: str) -> bool: ...
    def was_sent(self, job: QueuedJob) -> bool: ...


@dataclass
class Times:
    """The clocks of this machine, and how to wait."""

    now: Callable[[], float] = time.time
    passed: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = time.sleep


@dataclass
class QueueRun:
    """One runner. `swept`: hears the runs of a sweep that is over. `tell`: the owner's messages, of an occasion, whom it is of, and the text.
    `is_supervised`: runs get a supervisor, which tells of them by itself."""

    queue: QueueFolder
    work: NodeWork
    say: Say
    swept: Callable[[tuple[str, ...]], None] = lambda runs: None
    tell: Callable[[Occasion, str, str], None] = lambda occasion, subject, text: None
    is_supervised: bool = True
    times: Times = field(default_factory=Times)
    _again: dict[int, float] = field(default_factory=dict)
    _closing: dict[int, tuple[float, int]] = field(default_factory=dict)
    _told: dict[int, str] = field(default_factory=dict)
    _sent: tuple[int, ...] = ()

    def go(self, *, stays: bool) -> None:
        """Until nothing waits and nothing trains; `stays`: also then. To be called by who holds `QueueFolder.runner`."""
        self.queue.untold()  # from now on the ends of jobs are told
        while True:
            try:
                self.look()
                self._told.pop(_OF_THE_QUEUE, None)
            except HomelabError as error:  # a full disk, say: nothing is lost, and the night is long
                if self._told.get(_OF_THE_QUEUE) != error.message:
                    self.say(f"it is looked again, because something could not be done: {error}")
                self._told[_OF_THE_QUEUE] = error.message
            listing = self.queue.listing()
            if not stays and not listing.waiting and not listing.running:
                return
            self.times.wait(LOOK_S)

    def look(self) -> None:
        """One look: go on with what trains, then start the first job that may."""
        for job in self.queue.listing().running:
            if job.state != "running":
                self._put_away(job)
                continue
            try:
                self._follow(job)
            except HomelabError as error:
                self._tell(job, f"cannot be looked at: {error.message}")
        try:
            every = self.work.every()
        except HomelabError as error:
            if self._told.get(0) != error.message:
                self.say(f"nothing is started: {error}")
            self._told[0] = error.message
            return
        self._told.pop(0, None)
        listing = self.queue.listing()
        clock = Clock(self.times.now(), every, self.work.is_over)
        reasons = turns.waits(listing, clock)
        for job in listing.waiting:
            if not reasons[job.number] and self._again.get(job.number, 0.0) <= self.times.passed() and self._start(job):
                break
        listing = self.queue.listing()
        numbers = self.queue.untold() if turns.rests(listing, clock) else ()
        if numbers:
            if numbers != self._sent:  # what cannot be written down would be sent at every look
                self.tell("queue over", "", queue_list.over(listing, clock, numbers))
                self._sent = numbers
            self.queue.told(sorted(listing.over))

    def _start(self, job: QueuedJob) -> bool:
        """Whether anything was done for it that took time."""
        unfit: InputError | None = None
        try:
            because = self.work.busy(job)
        except InputError as error:  # of its recipe or its nodes: waiting mends none of it, and keeps the nodes from all later jobs
            because, unfit = "", error
        except HomelabError as error:
            because = f"{error.message} ({error.where})"
        if because:
            self._wait(job, because)
            return False
        self.say(f"{_named(job)}: {'goes on' if job.run else 'begins'}")
        if not self.queue.shift(job.number, "waiting", "running"):
            return False  # a person has removed it
        try:
            if unfit is not None:
                raise unfit
            self._begin(job)
        except NotYetError as error:
            self._wait(self._back(job, error.message, keeps_run=self._is_sent(job)), error.message, CHECKED_S)
        except HomelabError as error:
            self._refused(self._now(job), error)
        except KeyboardInterrupt:  # perhaps when all of it was done, or its ranks had begun
            self._back(job, "its start was interrupted", keeps_run=self._is_sent(job))
            raise
        return True

    def _is_sent(self, job: QueuedJob) -> bool:
        return self.work.was_sent(self._now(job))

    def _begin(self, job: QueuedJob) -> None:
        def named(run: str) -> None:
            self.queue.write("running", job.launched(run, self.times.now()))

        def refuse_held() -> None:
            listing = self.queue.listing()
            if listing.is_paused or (job.stop_at and not hours.is_open(job, self.times.now())):
                raise NotYetError("the queue is paused" if listing.is_paused else f"not before {job.not_before}")

        if not job.run:
            self.work.launch(job, named, refuse_held)
            return
        refuse_held()
        seen = self.work.look(job)
        if seen is None:
            self.work.launch(job, named, refuse_held)
        elif seen.state != "done":  # a person may have gone on with it meanwhile
            named(job.run)
            # One that trains without an owner was begun by a runner that was interrupted then: it is looked after like any other.
            if not seen.is_owned and seen.state not in _BEGUN:
                self.queue.write("running", self._now(job).stopping())  # until it trains it is a run that we have stopped
                self.work.resume(job)
                self.queue.write("running", self._now(job).going_on())
        else:
            named(job.run)

    def _refused(self, job: QueuedJob, error: HomelabError) -> None:
        if job.run and not self.work.was_sent(job):  # the name was given back
            job = job.model_copy(update={"run": ""})
        machine = error.machine if isinstance(error, MachineError) else ""
        self._end(job, Act("failed", f"{error.message} ({error.where}); to fix it: {error.hint}", machine), is_refused=True)

    def _now(self, job: QueuedJob) -> QueuedJob:
        """The job as its file has it now."""
        return self.queue.listing().with_number(job.number) or job

    def _back(self, job: QueuedJob, because: str, *, keeps_run: bool) -> QueuedJob:
        job = self.queue.write("running", self._now(job).returned(because, self.times.now(), keeps_run=keeps_run))
        self._put_away(job)
        return job

    def _wait(self, job: QueuedJob, because: str, seconds: float = AGAIN_S) -> None:
        self._again[job.number] = self.times.passed() + seconds
        if job.because != because:
            self.queue.write("waiting", job.model_copy(update={"because": because}))
        self._tell(job, f"waits: {because}")

    def _follow(self, job: QueuedJob) -> None:
        seen = self.work.look(job)
        act = turns.next_act(job, seen, self.times.now(), is_supervised=self.is_supervised)
        if act.kind != "stop":
            self._closing.pop(job.number, None)
        if job.is_stopping and act.kind in ("follow", "supervise") and seen is not None and seen.state == "running":
            job = self.queue.write("running", job.going_on())  # the runner before was killed when it had gone on with it
        match act.kind:
            case "supervise":
                self.say(f"{_named(job)}: nobody looks after {job.run}; its supervisor is started")
                self.work.supervise(job)
            case "stop":
                self._close(job, act, seen)
            case "clear":
                job = self.queue.write("running", job.stopping())
                if self.work.stop(job):
                    self._return(job, act)
            case "back":
                self._return(job, act)
            case "done":
                self._end(job, act)
            case "failed":
                # A node that is off, or gone for good, keeps no job: who is next asks it before.
                if self.work.stop(job, everywhere=False):
                    self._end(job, act)
                else:
                    self._tell(job, "it has failed, and what is left of it could not be stopped yet")

    def _close(self, job: QueuedJob, act: Act, seen: SeenRun | None) -> None:
        """Stop a run whose hour is over, at its next checkpoint."""
        step, newest = (seen.step, max(seen.checkpoints, default=0)) if seen else (0, 0)
        since, before = self._closing.setdefault(job.number, (self.times.passed(), newest))
        is_saved = step <= newest or newest > before
        if not is_saved and self.times.passed() - since < CHECKPOINT_S:
            self._tell(job, f"{act.because}; it stops at its next checkpoint")
            return
        self.say(f"{_named(job)}: {act.because}; {job.run} is stopped")
        job = self.queue.write("running", job.stopping())
        if self.work.stop(job):
            self._return(job, Act("back", f"not before {job.not_before}", keeps_run=True))

    def _return(self, job: QueuedJob, act: Act) -> None:
        self.say(f"{_named(job)}: {act.because}; it waits again")
        self._back(job, act.because, keeps_run=act.keeps_run)

    def _end(self, job: QueuedJob, act: Act, *, is_refused: bool = False) -> None:
        state: Literal["done", "failed"] = "done" if act.kind == "done" else "failed"
        self.say(f"{_named(job)}: {state}{f': {act.because}' if act.because else ''}")
        self._put_away(self.queue.write("running", job.ended(state, act.because, self.times.now(), act.machine)))
        if state == "failed" and (is_refused or not self.is_supervised):
            self.tell("gave up", _named(job), act.because)
        runs = turns.sweep_is_over(self.queue.listing(), job.sweep)
        if len(runs) > 1:
            self.swept(runs)

    def _put_away(self, job: QueuedJob) -> None:
        """The second half of a change that its content tells of."""
        self.work.forget(job)
        self.queue.shift(job.number, "running", job.state)
        self._told.pop(job.number, None)

    def _tell(self, job: QueuedJob, text: str) -> None:
        """Once, not at each look."""
        if self._told.get(job.number) != text:
            self._told[job.number] = text
            self.say(f"{_named(job)}: {text}")


def _named(job: QueuedJob) -> str:
    return f"job {job.number}, {Path(job.recipe).name}{f', {job.settings}' if job.settings else ''}"
