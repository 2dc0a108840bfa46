"""The stages of a training: micro-batch, order of the ranks, layers of each, what each holds and what a step takes. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from homelab.law import pipeline_schedule
from homelab.law.limits import Limits
from homelab.law.speed import Speed
from homelab.planning.job import TrainingJob
from homelab.planning.machines import RankSlot
from homelab.planning.memory import rank_memory
from homelab.planning.memory.scenario import DoesNotFit
from homelab.planning.performance import step_time
from homelab.planning.performance.speed_estimate import DATA_SHEET, EQUAL, OWNER
from homelab.planning.pipeline import partition, stage_memory, stage_time
from homelab.planning.pipeline.partition import Cut
from homelab.planning.pipeline.stage_memory import Part
from homelab.planning.pipeline.stage_time import Costs, StageTimes
from homelab.planning.strategy import network_cost, ranks
from homelab.planning.types import Choice, MemoryEstimate, RankPlan, RankTime, StagePlan, TimeEstimate
from homelab.text.units import gigabytes

if TYPE_CHECKING:
    from homelab.planning.strategy.base import Strategy

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_SAME_MACHINE_BYTES_PER_S = 5e9  # through host memory; assumed


@dataclass(frozen=True)
class PipelinePlan:
    """The ranks with their stages, in rank order, and the reasons."""

    ranks: tuple[RankPlan, ...]
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    """A cut for a size of micro-batches, and the seconds of a step."""

    rows: int
    cut: Cut
    in_flight: tuple[int, ...]
    step_s: float


def make(job: TrainingJob) -> PipelinePlan:
    """The fastest way to cut the model that fits. Raises DoesNotFit where none does."""
    assert job.shape is not None
    asked = job.recipe.parallel.micro_batch
    sizes = [asked] if asked != "auto" else [rows for rows in _MICRO_BATCHES if rows <= max(1, job.recipe.train.global_batch // job.machines.world_size)]
    candidates = [candidate for rows in sizes for candidate in _candidates(job, min(rows, job.recipe.train.global_batch))]
    if not candidates:
        raise _does_not_fit(job)
    best = min(candidates, key=lambda one: (one.step_s, one.rows, one.cut.order))
    return _plan(job, best)


def _candidates(job: TrainingJob, rows: int) -> list[_Candidate]:
    """The cuts of this size of micro-batches, each with as many in flight as hide the wire and fit."""
    stages, assert_shape = job.machines.world_size, job.shape
    assert assert_shape is not None
    speeds, passes = _speeds(job), pass_tokens(job, rows)
    costs = stage_time.costs_of(assert_shape, job.recipe.method, job.recipe.train)

    @functools.cache
    def seconds(rank: int, stage: int, layers: int) -> float:
        return costs.work(layers, is_last=stage == stages - 1) * speeds[rank].seconds(passes)

    for flights in (pipeline_schedule.least_in_flight, lambda stage, stages: 1):
        most = functools.partial(_most_layers, job, rows, flights)
        found = partition.cuts(stages, assert_shape.layers, most, seconds)
        if found:
            break
    result = []
    for cut in found:
        in_flight = _in_flight(job, rows, cut)
        times = _stage_times(job, cut.order, cut.layers, in_flight, passes, costs)
        result.append(_Candidate(rows, cut, in_flight, stage_time.step_s(times)))
    return result


def _part(stage: int, stages: int, layers: int) -> Part:
    return Part(layers, stage == 0, stage == stages - 1)


def _needed(job: TrainingJob, slot: RankSlot, rows: int, part: Part, in_flight: int) -> int:
    assert job.shape is not None
    return stage_memory.needed_bytes(job.shape, job.recipe.method, job.recipe.train, ranks.setup_of(job, slot, rows), part, in_flight)


def _most_layers(job: TrainingJob, rows: int, flights: object, rank: int, stage: int) -> int:
    """How many layers have room on this rank as this stage; 0: not even one."""
    slot, stages = job.machines.slots[rank], job.machines.world_size
    assert job.shape is not None and callable(flights)
    available, in_flight = slot.memory()[0], min(flights(stage, stages), _passes_at_most(job, rows))
    if available is None:
        return job.shape.layers
    low, high = 0, job.shape.layers
    while low < high:
        middle = (low + high + 1) // 2
        fits = _needed(job, slot, rows, _part(stage, stages, middle), in_flight) <= available
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def _passes_at_most(job: TrainingJob, rows: int) -> int:
    return -(-job.recipe.train.global_batch // rows)


def _in_flight(job: TrainingJob, rows: int, cut: Cut) -> tuple[int, ...]:
    """Micro-batches that each stage keeps: as many as hide a message, fewer where memory is short."""
    stages, result = len(cut.order), []
    for stage, (rank, layers) in enumerate(zip(cut.order, cut.layers, strict=True)):
        slot = job.machines.slots[rank]
        available = slot.memory()[0]
        count = min(pipeline_schedule.most_in_flight(stage, stages), _passes_at_most(job, rows))
        while count > 1 and available is not None and _needed(job, slot, rows, _part(stage, stages, layers), count) > available:
            count -= 1
        result.append(count)
    return tuple(result)


def pass_tokens(job: TrainingJob, rows: int) -> tuple[int, ...]:
    """The tokens of each micro-batch of a typical step, by the worker's own rule."""
    recipe, data = job.recipe, job.workload.rows
    limits = Limits.planned(rows, None, seq_len=recipe.train.seq_len, asked=recipe.parallel.micro_batch, padded=bool(data.padded))
    first = step_time.Worker(0, "", "", Speed(0.0, 0.0, 1.0), limits, recipe.train.global_batch)
    lengths = data.lengths(recipe.train.global_batch, recipe.train.seq_len)
    return tuple(step_time.passes_of([first], lengths, [recipe.train.global_batch])[0])


def _speeds(job: TrainingJob) -> list[Speed]:
    """Of the whole model on each rank; where nothing is known, all are alike."""
    known = job.workload.speeds.speeds
    if known is None:
        weights = job.workload.speeds.weights
        return [Speed(0.0, 0.0, 1 / weights[slot.node.name][slot.local_rank]) for slot in job.machines.slots]
    slowdown = job.workload.speeds.slowdown("pipeline", job.machines.world_size)
    return [known[slot.node.name][slot.local_rank].slower(slowdown) for slot in job.machines.slots]


def _stage_times(job: TrainingJob, order: Sequence[int], layers: Sequence[int], in_flight: Sequence[int], passes: Sequence[int], costs: Costs) -> list[StageTimes]:
    assert job.shape is not None
    speeds, slots, last, times = _speeds(job), job.machines.slots, len(order) - 1, []
    for stage, (rank, count) in enumerate(zip(order, layers, strict=True)):
        whole = [speeds[rank].micro_batch_s + speeds[rank].token_s * tokens for tokens in passes]
        forward, backward = (part(count, is_last=stage == last) for part in (costs.forward, costs.backward))
        messages = [0.0] * len(passes)
        if stage != last:
            rate = _bytes_per_s(job, slots[rank], slots[order[stage + 1]])
            messages = [stage_memory.message_bytes(job.shape, job.recipe.method, job.precision, tokens) / rate for tokens in passes]
        times.append(StageTimes([forward * one for one in whole], [backward * one for one in whole], messages, in_flight[stage]))
    return times


def _bytes_per_s(job: TrainingJob, one: RankSlot, other: RankSlot) -> float:
    if one.node.name == other.node.name:
        return _SAME_MACHINE_BYTES_PER_S
    return network_cost.wire_between((one.node.name, other.node.name), job.throughputs).bytes_per_s


def _plan(job: TrainingJob, best: _Candidate) -> PipelinePlan:
    assert job.shape is not None
    shape, recipe, slots = job.shape, job.recipe, job.machines.slots
    costs, stages, begin = stage_time.costs_of(shape, recipe.method, recipe.train), len(best.cut.order), 0
    known = job.workload.speeds.speeds
    by_rank: dict[int, RankPlan] = {}
    for number, (rank, layers, in_flight) in enumerate(zip(best.cut.order, best.cut.layers, best.in_flight, strict=True)):
        slot = slots[rank]
        items = stage_memory.estimate(shape, recipe.method, recipe.train, ranks.setup_of(job, slot, best.rows), _part(number, stages, layers), in_flight)
        stage = StagePlan(
            number=number, begin=begin, end=begin + layers, layers=shape.layers, work=costs.work(layers, is_last=number == stages - 1), in_flight=in_flight
        )
        by_rank[rank] = ranks.rank_of(slot, share=recipe.train.global_batch if number == 0 else 0, micro_batch=best.rows).model_copy(
            update={
                "memory": MemoryEstimate(items=items, available_bytes=slot.memory()[0]), "stage": stage,
                "speed": known[slot.node.name][slot.local_rank] if known else None,
            }
        )  # fmt: skip
        begin += layers
    planned = tuple(by_rank[rank] for rank in range(stages))
    return PipelinePlan(planned, tuple(_choices(job, best, planned)))


def _choices(job: TrainingJob, best: _Candidate, planned: Sequence[RankPlan]) -> list[Choice]:
    """What each stage holds and why, and which one sets the pace."""
    costs, passes = stage_time.costs_of(job.shape, job.recipe.method, job.recipe.train), pass_tokens(job, best.rows)  # type: ignore[arg-type]
    times = _stage_times(job, best.cut.order, best.cut.layers, best.in_flight, passes, costs)
    slowest = max(range(len(times)), key=lambda number: times[number].busy_s)
    choices = [Choice(
        subject="micro-batch", value=str(best.rows),
        because=f"{len(passes)} micro-batches in a step; the stages fill and drain once per step, so more of them leave shorter gaps",
    )]  # fmt: skip
    for rank in sorted(planned, key=lambda one: one.stage.number if one.stage else 0):
        stage, memory = rank.stage, rank.memory
        assert stage is not None and memory is not None
        ends = [*(["the embeddings"] if stage.number == 0 else []), *(["the head"] if stage.number == len(planned) - 1 else [])]
        because = f"{gigabytes(memory.total_bytes)} GB at the peak, {stage.in_flight} micro-batches in flight"
        if job.workload.speeds.speeds is not None:
            because += f"; computes {times[stage.number].busy_s:.3g} s of a step of {best.step_s:.3g} s"
        if stage.number == slowest:
            because += "; it sets the pace"
        choices.append(Choice(subject=f"stage {stage.number + 1}: rank {rank.rank} on {rank.node}", value=f"layers {stage.begin} to {stage.end - 1}{''.join(f' and {end}' for end in ends)}", because=because))
    return choices


def _does_not_fit(job: TrainingJob) -> DoesNotFit:
    """The error that names what has no room."""
    stages, slots, shape = job.machines.world_size, job.machines.slots, job.shape
    assert shape is not None
    one = functools.partial(_most_layers, job, 1, lambda stage, stages: 1)
    room = [max(one(rank, stage) for stage in range(stages)) for rank in range(stages)]
    scenario = ranks.scenario_of(job)
    assert scenario is not None, "where no memory is known, everything fits"
    empty = [slots[rank].node.name for rank in range(stages) if room[rank] == 0]
    if empty:
        others = ",".join(slot.node.name for slot in slots if slot.node.name not in empty)
        return DoesNotFit(
            f"not even one layer fits on {', '.join(empty)}", where="recipe, [parallel] strategy",
            hint=f"leave it out: --nodes {others}" if others else "homelab plan RECIPE --fit, or a shorter seq_len", scenario=scenario,
        )  # fmt: skip
    text = ", ".join(f"{slots[rank].node.name} {count}" for rank, count in enumerate(room))
    return DoesNotFit(
        f"the {shape.layers} layers do not fit on these cards: room for {sum(room)} of them at most ({text})", where="recipe, [model] name",
        hint="homelab plan RECIPE --fit; a shorter seq_len, kind = \"qlora\", or another machine", scenario=scenario,
    )  # fmt: skip


def checkpoint_bytes(job: TrainingJob) -> int:
    """What the stages exchange before a checkpoint is written."""
    return rank_memory.CHECKPOINT_BYTES * rank_memory.trainable_parameters(job.shape, job.recipe.method) if job.shape else 0


def time_of(job: TrainingJob, strategy: Strategy, planned: Sequence[RankPlan]) -> TimeEstimate | None:
    """The time of these stages; None where no speed is known."""
    if job.shape is None or job.workload.speeds.speeds is None:
        return None
    recipe, rows, speeds = job.recipe, job.workload.rows, _speeds(job)
    by_stage = sorted(planned, key=lambda rank: rank.stage.number if rank.stage else 0)
    order, layers, in_flight = ([getattr(rank.stage, name) for rank in by_stage] for name in ("number", "end", "in_flight"))
    order = [rank.rank for rank in by_stage]
    layers = [rank.stage.end - rank.stage.begin for rank in by_stage if rank.stage]
    passes, costs = pass_tokens(job, planned[0].micro_batch), stage_time.costs_of(job.shape, recipe.method, recipe.train)
    times = _stage_times(job, order, layers, in_flight, passes, costs)
    fixed_s = max(speeds[rank].step_s * (by_stage[number].stage.work if by_stage[number].stage else 1) for number, rank in enumerate(order))  # type: ignore[union-attr]
    step_s = stage_time.step_s(times) + fixed_s
    compute_s = max(one.busy_s for one in times)
    without_wire_s = stage_time.step_s([dataclasses.replace(one, message_s=[0.0] * len(passes)) for one in times]) + fixed_s
    equal = _equal(job.shape.layers, len(order))
    equal_s = stage_time.step_s(_stage_times(job, order, equal, in_flight, passes, costs)) + fixed_s
    tokens, sources = sum(passes), job.workload.speeds.sources
    alone = [tokens / speeds[slot.rank].seconds(passes) for slot in job.machines.slots]
    wire = network_cost.wire_between({rank.node for rank in planned}, job.throughputs)
    gathers_s = strategy.checkpoint_wire_s(job, len(planned), wire.bytes_per_s) if len(job.machines.nodes) > 1 else 0.0
    save_s, evaluate_s = step_time.save_s_of(job, gathers_s), step_time.evaluate_s_of(job, sum(alone))
    steps = rows.steps(recipe)
    seconds = None if steps is None else step_time.whole_s(job, steps, step_s, save_s, evaluate_s)
    size_bytes = strategy.step_bytes(job, len(passes)) or 0
    busy = {rank: one.busy_s for rank, one in zip(order, times, strict=True)}
    return TimeEstimate(
        is_measured=not set(sources.values()) & {DATA_SHEET, OWNER, EQUAL} and rows.is_measured, steps=steps, row_tokens=rows.tokens_mean,
        rows_because=rows.because, compute_s=compute_s, wire_s=step_s - without_wire_s, wire_hidden_s=max(0.0, strategy.wire_s(size_bytes, len(order), wire.bytes_per_s) - (step_s - without_wire_s)),
        wire_because=f"{network_cost.bytes_text(size_bytes)} cross each boundary in a step, at {wire}; what is not hidden behind passes",
        wire_is_measured=False, wait_s=max(0.0, without_wire_s - compute_s), step_s=step_s, best_step_s=tokens / sum(alone), equal_step_s=equal_s,
        tokens_per_s=tokens / step_s, efficiency=tokens / step_s / sum(alone), equal_efficiency=tokens / equal_s / sum(alone),
        save_s=save_s, evaluate_s=evaluate_s, hours=None if seconds is None else seconds / 3600,
        ranks=tuple(
            RankTime(rank=rank.rank, node=rank.node, source=sources[rank.node], alone_tokens_per_s=alone[rank.rank], tokens=tokens, busy_s=busy[rank.rank])
            for rank in planned
        ),
        gains=(),
    )  # fmt: skip


def _equal(layers: int, stages: int) -> list[int]:
    """As many layers on each, the first ones one more."""
    return [layers // stages + (number < layers % stages) for number in range(stages)]
