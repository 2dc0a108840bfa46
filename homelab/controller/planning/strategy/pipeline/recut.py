"""Whether another cut of a model that trains is worth a restart, with the speeds that were measured since it was cut. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import machines
from homelab.controller.planning.strategy.pipeline import pipeline_plan, stage_time
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.types import Plan, RankPlan, StagePlan
from homelab.controller.planning.work import job
from homelab.controller.planning.work.speed_estimate import MEASURED
from homelab.shared.protocol.memory_items import HELD

LEAST_GAIN = 0.10  # of a step: below that the next measurement may say the opposite
_WORTH = 2.0  # what is saved is so many times as long as the restart, because both are estimates


@dataclass(frozen=True)
class Recut:
    """The layers of each node now and then, in the order of the stages, with the seconds of a step, and what the rest of the training saves."""

    layers: str
    faster_layers: str
    step_s: float
    faster_step_s: float
    saved_s: float

    @property
    def because(self) -> str:
        """In words."""
        return (
            f"by the measured speeds a step takes {self.faster_step_s:.3g} s with the layers {self.faster_layers}, and {self.step_s:.3g} s with {self.layers}: "
            f"it saves about {self.saved_s / 60:.2g} minutes"
        )


def faster(inputs: PlanInputs, running: Plan, restart_s: float) -> Recut | None:
    """A cut from the checkpoint at `inputs.resume_step` on that pays for a restart of `restart_s` seconds; None where none does, or where not every rank
    was measured.

    The facts may be of now: what the ranks of `running` hold themselves is not counted against them.
    """
    stages = {rank.rank: rank.stage for rank in running.ranks if rank.stage is not None}
    try:
        taking_part = dataclasses.replace(machines.choose(inputs), held_bytes=_held_bytes(running))
        work = job.of(inputs, taking_part, running.precision)
        is_same = [(slot.node.name, slot.local_rank) for slot in taking_part.slots] == [
            (rank.node, rank.local_rank) for rank in running.ranks
        ]
        if (
            not is_same
            or len(stages) < 2
            or not isinstance(work, job.TrainingJob)
            or work.shape is None
            or set(work.workload.speeds.sources.values()) != {MEASURED}
        ):
            return None
        best = pipeline_plan.fastest(work)
    except HomelabError:
        return None  # what is wrong is said by the checks of the next attempt
    steps = work.workload.rows.steps(work.recipe)
    faster_stages = {rank.rank: rank.stage for rank in pipeline_plan.rank_plans(best) if rank.stage is not None}
    # With the same layers only micro-batches differ: they were halved where memory ran out, and would be again after every restart.
    if steps is None or all((one.begin, one.end) == (faster_stages[rank].begin, faster_stages[rank].end) for rank, one in stages.items()):
        return None
    step_s, faster_s = _step_s(work, running, stages), best.step_s
    saved_s = (steps - inputs.resume_step) * (step_s - faster_s) - restart_s
    if faster_s > step_s * (1 - LEAST_GAIN) or saved_s < (_WORTH - 1) * restart_s:
        return None
    return Recut(_layers(running.ranks, stages), _layers(running.ranks, faster_stages), step_s, faster_s, saved_s)


def _step_s(work: job.TrainingJob, running: Plan, stages: Mapping[int, StagePlan]) -> float:
    order = _in_order(stages)
    batching = MicroBatching(work, running.ranks[0].micro_batch, streams=any(rank.streaming for rank in running.ranks))
    layers, in_flight = ([stages[rank].end - stages[rank].begin for rank in order], [stages[rank].in_flight for rank in order])
    return stage_time.step_s(batching.times(order, layers, in_flight)) + batching.table_s(order)


def _held_bytes(running: Plan) -> dict[int, int]:
    return {
        rank.rank: sum(item.size_bytes for item in rank.memory.items if item.name == HELD)
        for rank in running.ranks
        if rank.memory is not None
    }


def _layers(ranks: tuple[RankPlan, ...], stages: Mapping[int, StagePlan]) -> str:
    return " / ".join(f"{stages[rank].end - stages[rank].begin} on {ranks[rank].node}" for rank in _in_order(stages))


def _in_order(stages: Mapping[int, StagePlan]) -> list[int]:
    return sorted(stages, key=lambda rank: stages[rank].number)
