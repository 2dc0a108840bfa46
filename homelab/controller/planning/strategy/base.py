"""What a way to divide a training over processes has to tell the planner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.memory.scenario import NodesWithoutRoom
from homelab.controller.planning.time import step_time
from homelab.controller.planning.time.network_cost import NetworkCost
from homelab.controller.planning.types import Choice, FewerNodes, Plan, RankPlan, TimeEstimate
from homelab.controller.planning.work.job import Job, TrainingJob

CheckpointLayout = Literal["replicated", "sharded"]
Automatic = Literal["first", "fallback", "never"]

TIMEOUT_S = 120  # for ranks to connect; in a step a slow peer is waited for longer (`homelab.worker.runtime.process_group`)


@dataclass(frozen=True)
class Assignment:
    """The work and the memory of every rank, in rank order, with the reasons and with what a person should know."""

    ranks: tuple[RankPlan, ...]
    choices: tuple[Choice, ...] = ()
    warnings: tuple[str, ...] = ()


class Strategy(NetworkCost):
    """One way to divide a training. `checkpoint_layout`: every rank can save and load all of the state, or its own part alone.

    Each trains in every precision: in fp16 all ranks judge a step by the norm of the whole gradient (`homelab.worker.training.loss_scale`)."""

    checkpoint_layout: ClassVar[CheckpointLayout]
    is_per_pass: ClassVar[bool] = False
    """Whether every pass exchanges something, so that all ranks make the same number of them."""

    waits_in_passes: ClassVar[bool] = False
    """Whether a pass on a card holds waits for other ranks that nobody measures: its seconds are then no speed of this rank."""

    cuts_layers: ClassVar[bool] = False
    """Whether each rank holds some of the layers alone: a question to the model is then answered across them, and a run may move layers."""

    def automatic(self, job: Job) -> Automatic:
        """Whether "auto" considers it for this job: at first, where nothing else has room on every rank, or never."""
        return "first"

    @abstractmethod
    def assign(self, job: Job) -> Assignment:
        """The work and the memory of every rank. Raises HomelabError where the strategy cannot train this job on these machines."""

    @abstractmethod
    def because(self, job: Job) -> str:
        """What the strategy costs on these machines, as the reason in the plan."""

    def feasible(self, job: Job) -> Assignment | HomelabError:
        """The assignment, or why there is none."""
        try:
            return self.assign(job)
        except HomelabError as error:
            return error

    def moves_rows(self, job: Job) -> bool:
        """Whether rows may go to another rank while the training runs, by the speeds that it measures."""
        return True

    def useless_nodes(self, job: Job) -> NodesWithoutRoom | None:
        """The nodes with which there is no plan and without which there may be one; None where that is not what is wrong."""
        return None

    def loaded_part(self, ranks: Sequence[RankPlan]) -> float:
        """Of the model's layers, those that the ranks of one node read, where that is most."""
        return 1.0

    def compared(self, job: TrainingJob, time: TimeEstimate) -> tuple[str, ...]:
        """Sentences that compare this way to train with another one."""
        return ()

    def fewer_nodes(self, job: TrainingJob, time: TimeEstimate) -> FewerNodes | None:
        """Nodes that train this faster in another way than all do in this one; None where the gains of the nodes say it, or nothing does."""
        return None

    def ways_to_room(self, plan: Plan) -> str:
        """What makes room where it lacks; empty where edits of the recipe are searched for that (`planning.memory.recipe_edits`)."""
        return ""

    def seconds(self, job: TrainingJob, ranks: tuple[RankPlan, ...]) -> TimeEstimate | None:
        """The time of these ranks; None where no speed is known."""
        return step_time.estimate(job, self, ranks)

    def worker_settings(self, job: Job) -> Mapping[str, str]:
        """Environment variables that the workers need for this strategy: how long ranks wait for each other to connect."""
        return {"HOMELAB_DDP_TIMEOUT_S": str(TIMEOUT_S)}
