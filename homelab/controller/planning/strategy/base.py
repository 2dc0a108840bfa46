"""What a way to divide a training over processes has to tell the planner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.job import Job, TrainingJob
from homelab.controller.planning.time import step_time
from homelab.controller.planning.time.hidden_wire import LastPass
from homelab.controller.planning.types import Choice, RankPlan, TimeEstimate

CheckpointLayout = Literal["replicated", "sharded"]
Automatic = Literal["first", "fallback", "never"]


@dataclass(frozen=True)
class Assignment:
    """The work and the memory of every rank, in rank order, with the reasons and with what a person should know."""

    ranks: tuple[RankPlan, ...]
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()


class Strategy(ABC):
    """One way to divide a training. `checkpoint_layout`: every rank can save and load all of the state, or its own part alone.

    Each trains in every precision: in fp16 all ranks judge a step by the norm of the whole gradient (`homelab.worker.training.loss_scale`)."""

    name: ClassVar[str]
    checkpoint_layout: ClassVar[CheckpointLayout]
    is_per_pass: ClassVar[bool] = False
    """Whether every pass exchanges something, so that all ranks make the same number of them."""

    waits_in_passes: ClassVar[bool] = False
    """Whether a pass on a card holds waits for other ranks that nobody measures: its seconds are then no speed of this rank."""

    def automatic(self, job: Job) -> Automatic:
        """Whether "auto" considers it for this job: at first, where nothing else has room on every rank, or never."""
        return "first"

    @abstractmethod
    def assign(self, job: Job) -> Assignment:
        """The work and the memory of every rank. Raises HomelabError where the strategy cannot train this job on these machines."""

    @abstractmethod
    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """Bytes of what the ranks exchange in an optimizer step of so many passes; None where the model's shape is not known."""

    @abstractmethod
    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """Seconds that these bytes take in one step, with so many ranks and this speed of the slowest wire."""

    def exposed_s(self, job: TrainingJob, wire_s: float, passes: Sequence[LastPass]) -> float:
        """Of the seconds on the wire, those in which no rank computes any more. `passes`: the last one of each rank."""
        return wire_s

    @abstractmethod
    def because(self, job: Job) -> str:
        """What the strategy costs on these machines, as the reason in the plan."""

    def feasible(self, job: Job) -> Assignment | HomelabError:
        """The assignment, or why there is none."""
        try:
            return self.assign(job)
        except HomelabError as error:
            return error

    def checkpoint_wire_s(self, job: TrainingJob, ranks: int, bytes_per_s: float) -> float:
        """Seconds on the wire before a checkpoint can be written."""
        return 0.0

    def seconds(self, job: TrainingJob, ranks: tuple[RankPlan, ...]) -> TimeEstimate | None:
        """The time of these ranks; None where no speed is known."""
        return step_time.estimate(job, self, ranks)

    def worker_settings(self, job: Job) -> Mapping[str, str]:
        """Environment variables that the workers need for this strategy."""
        return {}
