"""One job of the queue, as its file has it, and its changes. Pure.

A job lies in the folder of its state, and each change is one rename: of the file into another folder, or of new content over the old one. The content
says `state`, too. Between the two renames of one change a job lies in running/ and says where it belongs: it is waiting, and nothing was launched,
or it is on its way out. So whoever finds it there after a crash knows what to do.

    waiting/  --rename-->  running/ (says waiting)  --content-->  running, with the name of its run
    running/  --content->  says waiting, done or failed  --rename-->  that folder
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from homelab.controller.base.models import WireModel

State = Literal["waiting", "running", "done", "failed"]
STATES: tuple[State, ...] = get_args(State)
Short = Annotated[str, Field(max_length=500)]
Names = Annotated[tuple[Short, ...], Field(max_length=200)]
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]


class Try(WireModel):
    """One time that the job trained: since 1970; `ended_at` is 0 while it trains."""

    began_at: Moment
    ended_at: Moment = 0.0


class QueuedJob(WireModel):
    """`recipe`: the recipe's file, whose folder its relative paths begin in; `text`: what it said when it was added. `digests`: role -> its content then.

    `nodes`: empty for all of the cluster. `after`: a number or a run. `not_before`, `stop_at`: HH:MM of this machine's clock, or empty. `seconds`: how long
    the plan expects it to train. `sweep`: the number of the first job that was made from the same recipe, 0 if it is alone; `settings`: what differs.
    `run`: its run, which goes on if the job waits again. `is_stopping`: the hour has come, and the run is about to be stopped. `because`: why it waits, or
    how it ended. `machine`: the node whose fault ended it.
    """

    number: Annotated[int, Field(ge=1, le=10**9)]
    recipe: Annotated[str, Field(max_length=5000)]
    text: Annotated[str, Field(max_length=1 << 21)]
    digests: dict[str, Short] = {}
    nodes: Names = ()
    skip: Names = ()
    after: Short = ""
    not_before: Short = ""
    stop_at: Short = ""
    added_at: Moment = 0.0
    seconds: float | None = None
    sweep: int = 0
    settings: Short = ""
    state: State = "waiting"
    run: Short = ""
    tries: tuple[Try, ...] = ()
    is_stopping: bool = False
    because: str = ""
    machine: Short = ""
    ended_at: Moment = 0.0

    def needs(self, every: tuple[str, ...]) -> tuple[str, ...]:
        """The nodes that it trains on; `every` node of the cluster."""
        return self.nodes or every

    @property
    def trained_s(self) -> float:
        """For how long it has trained in tries that are over."""
        return sum(max(0.0, one.ended_at - one.began_at) for one in self.tries if one.ended_at)

    @property
    def began_at(self) -> float:
        """When it began to train this time; 0 if it does not."""
        return self.tries[-1].began_at if self.tries and not self.tries[-1].ended_at else 0.0

    def launched(self, run: str, now: float) -> QueuedJob:
        """It has this run now, which may be on the nodes from here on."""
        tries = (*self._closed(now), Try(began_at=now))
        return self.model_copy(update={"state": "running", "run": run, "tries": tries, "is_stopping": False, "because": ""})

    def stopping(self) -> QueuedJob:
        """Its run is stopped next, by us."""
        return self.model_copy(update={"is_stopping": True})

    def going_on(self) -> QueuedJob:
        """Its run, which we had stopped, trains again."""
        return self.model_copy(update={"is_stopping": False})

    def returned(self, because: str, now: float, *, keeps_run: bool = False) -> QueuedJob:
        """It waits again; with its run it goes on with that, else it begins anew."""
        kept = {} if keeps_run else {"run": "", "tries": ()}
        tries = {"tries": self._closed(now)}
        return self.model_copy(update={"state": "waiting", "is_stopping": False, "because": because, **tries, **kept})

    def ended(self, state: Literal["done", "failed"], because: str, now: float, machine: str = "") -> QueuedJob:
        """Nothing more is done for it."""
        ended = {"state": state, "because": because, "machine": machine, "ended_at": now, "is_stopping": False}
        return self.model_copy(update={**ended, "tries": self._closed(now)})

    def _closed(self, now: float) -> tuple[Try, ...]:
        if not self.began_at:
            return self.tries
        last = self.tries[-1]
        return (*self.tries[:-1], last.model_copy(update={"ended_at": max(now, last.began_at)}))
