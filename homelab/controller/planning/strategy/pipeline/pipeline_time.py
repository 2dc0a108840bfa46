"""The seconds of a step of a pipeline, put together as for any other strategy. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from homelab.controller.planning.strategy.pipeline import stage_time
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.strategy.pipeline.stage_time import StageTimes
from homelab.controller.planning.time import network_cost, step_time
from homelab.controller.planning.time.network_cost import NetworkCost
from homelab.controller.planning.types import RankPlan, RankTime, TimeEstimate
from homelab.controller.planning.work.job import TrainingJob
from homelab.controller.planning.work.speed_estimate import is_measured


def estimate(job: TrainingJob, strategy: NetworkCost, planned: Sequence[RankPlan]) -> TimeEstimate | None:
    """The time of these stages; None where no speed is known."""
    if job.shape is None or job.workload.speeds.speeds is None:
        return None
    stages = {rank.rank: rank.stage for rank in planned if rank.stage is not None}
    order = sorted(stages, key=lambda rank: stages[rank].number)
    layers, in_flight = [stages[rank].end - stages[rank].begin for rank in order], [stages[rank].in_flight for rank in order]
    batching = MicroBatching(job, planned[0].micro_batch)
    rows, sources, speeds, tokens = job.workload.rows, job.workload.speeds.sources, batching.speeds, sum(batching.passes)
    times = batching.times(order, layers, in_flight)
    fixed_s = max(speeds[rank].step_s * stages[rank].work for rank in order)
    compute_s = max(one.busy_s for one in times) + fixed_s
    passes_s, without_wire_s = stage_time.step_s(times), stage_time.step_s([_without_wire(one) for one in times])
    step_s, wire_s = passes_s + fixed_s, passes_s - without_wire_s
    equal_s = stage_time.step_s(batching.times(order, _equal(batching.shape.layers, len(order)), in_flight)) + fixed_s
    alone = [tokens / speed.seconds(batching.passes) for speed in speeds]
    wire = network_cost.wire_between({rank.node for rank in planned}, job.throughputs)
    gathers_s = strategy.checkpoint_wire_s(job, len(order), wire.bytes_per_s) if len(job.machines.nodes) > 1 else 0.0
    save_s, evaluate_s = step_time.save_s_of(job, gathers_s), step_time.evaluate_s_of(job, sum(alone))
    steps, size_bytes = rows.steps(job.recipe), strategy.step_bytes(job, len(batching.passes)) or 0
    seconds = None if steps is None else step_time.whole_s(job, steps, step_s, save_s, evaluate_s)
    busy_s = {rank: one.busy_s for rank, one in zip(order, times, strict=True)}
    return TimeEstimate(
        is_measured=is_measured(sources.values()) and rows.is_measured, steps=steps, row_tokens=rows.tokens_mean,
        rows_because=rows.because, compute_s=compute_s, wire_s=wire_s, wire_hidden_s=max(0.0, strategy.wire_s(size_bytes, len(order), wire.bytes_per_s) - wire_s),
        wire_because=f"{network_cost.bytes_text(size_bytes)} cross each boundary in a step, at {wire}; this is what passes do not hide",
        wire_is_measured=wire.is_measured, wire_measured_ranks=len(order) if wire.is_measured else 0, fill_s=max(0.0, without_wire_s + fixed_s - compute_s),
        step_s=step_s, best_step_s=tokens / sum(alone) + wire_s, equal_step_s=equal_s, tokens_per_s=tokens / step_s,
        efficiency=tokens / step_s / sum(alone), equal_efficiency=tokens / equal_s / sum(alone), save_s=save_s, evaluate_s=evaluate_s,
        hours=None if seconds is None else seconds / 3600,
        ranks=tuple(
            RankTime(rank=rank.rank, node=rank.node, source=sources[rank.node], alone_tokens_per_s=alone[rank.rank], tokens=tokens, busy_s=busy_s[rank.rank])
            for rank in planned
        ),
        gains=(),
    )  # fmt: skip


def _without_wire(times: StageTimes) -> StageTimes:
    return dataclasses.replace(times, message_s=[0.0] * len(times.message_s))


def _equal(layers: int, stages: int) -> list[int]:
    """As many layers on each, the first ones one more."""
    return [layers // stages + (number < layers % stages) for number in range(stages)]
