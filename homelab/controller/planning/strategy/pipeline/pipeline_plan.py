"""The stages of a training: the size of micro-batches, the order of the ranks, and the layers of each. Pure."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import gigabytes
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.memory.scenario import DoesNotFit, NodesWithoutRoom
from homelab.controller.planning.memory_estimate import MemoryEstimate
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.pipeline import stage_time, streamed_rank
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.types import Choice, RankPlan, StagePlan
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.law import pipeline_schedule

_MOST_ORDERS = 720  # of six ranks; of more, orders by memory and by speed are tried
_PLAYED = 24
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_ALIKE = 0.02  # of a step: two rounds of measuring differ by more, and a layer that moves is read and quantised anew


@dataclass(frozen=True)
class StageLayout:
    """A cut of the model for a size of micro-batches, how many of them each stage keeps, and the seconds of a step."""

    batching: MicroBatching
    cut: Cut
    in_flight: tuple[int, ...]
    step_s: float


def fastest(job: TrainingJob) -> StageLayout:
    """The fastest way to cut the model that fits; of those that are as good as equal, the one in which most layers stay where they were. Raises DoesNotFit
    where none does, NodesWithoutRoom where nodes are of no use."""
    batch, asked = job.recipe.train.global_batch, job.recipe.parallel.micro_batch
    most_rows = max(1, batch // job.machines.world_size)
    sizes = [min(asked, batch)] if asked != "auto" else [rows for rows in _MICRO_BATCHES if rows <= most_rows]
    candidates = [stages for rows in sizes for stages in _cuts(MicroBatching(job, rows))]
    if not candidates and streamed_rank.why_not(job) is None:
        candidates = [stages for rows in sizes for stages in _cuts(MicroBatching(job, rows, streams=True))]
    if not candidates:
        raise _does_not_fit(MicroBatching(job, 1))
    most_s = min(one.step_s for one in candidates) * (1 + _ALIKE) if job.last_layers else math.inf
    return min(
        (one for one in candidates if one.step_s <= most_s),
        key=lambda one: (-one.cut.staying(job.machines.slots, job.last_layers), one.step_s, one.batching.rows, one.cut.order),
    )


def _cuts(batching: MicroBatching) -> list[StageLayout]:
    """The best cuts for this size of micro-batches. Where memory is too short to keep all stages busy, the stages keep one micro-batch each."""
    for flights in (pipeline_schedule.least_in_flight, _one):
        cuts = best_cuts(
            batching.stages,
            batching.shape.layers,
            functools.partial(batching.most_layers, flights=flights),
            functools.cache(batching.seconds),
        )
        if cuts:
            break
    flights_of = {cut: batching.in_flight(cut.order, cut.layers) for cut in cuts}
    return [
        StageLayout(
            batching, cut, in_flight, stage_time.step_s(batching.times(cut.order, cut.layers, in_flight)) + batching.table_s(cut.order)
        )
        for cut, in_flight in flights_of.items()
    ]


def _one(stage: int, stages: int) -> int:
    return 1


def rank_plans(stages: StageLayout) -> tuple[RankPlan, ...]:
    """The ranks with their stages, in rank order. The first stage has the whole batch as its share: it counts the rows."""
    batching, begin = stages.batching, 0
    recipe, known = batching.job.recipe, batching.job.workload.speeds.speeds
    planned: dict[int, RankPlan] = {}
    for number, (rank, layers, in_flight) in enumerate(zip(stages.cut.order, stages.cut.layers, stages.in_flight, strict=True)):
        slot = batching.slots[rank]
        work = batching.costs.work(layers, is_last=number == batching.stages - 1)
        stage = StagePlan(number=number, begin=begin, end=begin + layers, layers=batching.shape.layers, work=work, in_flight=in_flight)
        memory = MemoryEstimate(items=batching.items(rank, number, layers, in_flight), available_bytes=slot.memory()[0])
        place = ranks.rank_of(slot, share=recipe.train.global_batch if number == 0 else 0, micro_batch=batching.rows)
        speed = known[slot.node.name][slot.local_rank] if known else None
        streaming = batching.streaming(rank, number, layers, in_flight)
        planned[rank] = place.model_copy(update={"memory": memory, "stage": stage, "speed": speed, "streaming": streaming})
        begin += layers
    return tuple(planned[rank] for rank in range(batching.stages))


def choices(stages: StageLayout, planned: Sequence[RankPlan]) -> list[Choice]:
    """What each stage holds and why, and which one sets the pace."""
    batching = stages.batching
    times = batching.times(stages.cut.order, stages.cut.layers, stages.in_flight)
    slowest = max(range(len(times)), key=lambda number: times[number].busy_s)
    passes_because = f"{len(batching.passes)} micro-batches in a step: more of them make the gaps shorter while the stages fill and drain, larger ones compute faster"
    reasons = [Choice(subject="micro-batch", value=str(batching.rows), because=passes_because)]
    for number, rank in enumerate(planned[rank] for rank in stages.cut.order):
        stage, memory = rank.stage, rank.memory
        assert stage is not None and memory is not None
        ends = "".join([*([" and the embeddings"] if number == 0 else []), *([" and the head"] if number == batching.stages - 1 else [])])
        because = f"{gigabytes(memory.total_bytes)} GB at the peak, {stage.in_flight} micro-batches in flight"
        if batching.job.workload.speeds.speeds is not None:
            because += f"; computes {times[number].busy_s:.3g} s of a step of {stages.step_s:.3g} s"
        if rank.streaming is not None:
            because += f"; {rank.streaming.text}"
        because += "; it sets the pace" if number == slowest else ""
        subject = f"stage {number + 1}: rank {rank.rank} on {rank.node}"
        reasons.append(Choice(subject=subject, value=f"layers {stage.begin} to {stage.end - 1}{ends}", because=because))
    return reasons


def _does_not_fit(batching: MicroBatching) -> DoesNotFit:
    """The error that names what has no room, and how many layers there is room for."""
    slots, layers = batching.slots, batching.shape.layers
    whole = ranks.scenario_of(batching.job)
    assert whole is not None, "if no memory is known, everything fits"
    scenario = dataclasses.replace(whole, lacking_of_cut=functools.partial(lacking_bytes, batching.job))
    room = [max(batching.most_layers(rank, stage, _one) for stage in range(batching.stages)) for rank in range(batching.stages)]
    empty = dict.fromkeys(slots[rank].node.name for rank in range(batching.stages) if room[rank] == 0)
    if empty:
        others = dict.fromkeys(slot.node.name for slot in slots if slot.node.name not in empty)
        return NodesWithoutRoom(list(empty), list(others), "one layer", scenario)
    text = ", ".join(f"{slots[rank].node.name} {count}" for rank, count in enumerate(room))
    first, hosts = min(sum(room), layers - 1), streamed_rank.why_hosts_do_not_help(batching.job)
    is_least = batching.job.recipe.method.kind == "qlora" or batching.shape.widened
    ways = "a shorter seq_len" if is_least else 'a shorter seq_len, kind = "qlora"'
    return DoesNotFit(
        f"the {layers} layers do not fit on these machines: there is room for {text}, minus embeddings and head; layer {first} is the first that does not fit{hosts}",
        where="recipe, [model] name", hint=Hint("{}; {}, or another machine", homelab("plan RECIPE --fit"), ways), scenario=scenario,
    )  # fmt: skip


def lacking_bytes(job: TrainingJob, recipe: TrainRecipe) -> int:
    """What the layers without a place need with this recipe; 0 where a cut fits."""
    asked = recipe.parallel.micro_batch
    batching = MicroBatching(dataclasses.replace(job, recipe=recipe), 1 if asked == "auto" else min(asked, recipe.train.global_batch))
    if _cuts(batching):
        return 0
    room = sum(max(batching.most_layers(rank, stage, _one) for stage in range(batching.stages)) for rank in range(batching.stages))
    one_layer = sum(item.size_bytes for item in batching.items(0, 1, 2, 1)) - sum(item.size_bytes for item in batching.items(0, 1, 1, 1))
    return max(1, batching.shape.layers - room) * one_layer


@dataclass(frozen=True)
class Cut:
    """The ranks in the order of their stages, and the layers of each."""

    order: tuple[int, ...]
    layers: tuple[int, ...]
    slowest_s: float

    def staying(self, slots: Sequence[RankSlot], last: Mapping[tuple[str, int], range]) -> int:
        """How many layers are where they were."""
        begins = itertools.accumulate(self.layers, initial=0)
        before = [last.get((slots[rank].node.name, slots[rank].local_rank), range(0)) for rank in self.order]
        return sum(
            len(set(was).intersection(range(begin, begin + count))) for was, begin, count in zip(before, begins, self.layers, strict=False)
        )


def best_cuts(ranks: int, layers: int, most_layers: Callable[[int, int], int], seconds: Callable[[int, int, int], float]) -> list[Cut]:
    """The best cut of each order of the ranks, the fastest first; empty where no cut has room.

    For every order of the ranks, the best cut is found exactly: the least time of the slowest stage over all ways to give the first stages so many
    layers, one stage after the other. Of the best of these orders, the whole step is played through (`stage_time`), and the fastest is taken.

    `most_layers(rank, stage)`: how many layers fit; `seconds(rank, stage, count)`: what so many of them take of a step.
    """
    room = {(rank, stage): most_layers(rank, stage) for rank in range(ranks) for stage in range(ranks)}
    results = []
    for order in _orders(ranks, room):
        layers_of = _best(order, layers, room, seconds)
        if layers_of is not None:
            slowest_s = max(seconds(rank, stage, count) for stage, (rank, count) in enumerate(zip(order, layers_of, strict=True)))
            results.append(Cut(order, layers_of, slowest_s))
    return sorted(results, key=lambda cut: (cut.slowest_s, cut.order))[:_PLAYED]


def _orders(ranks: int, room: dict[tuple[int, int], int]) -> Iterator[tuple[int, ...]]:
    if math.factorial(ranks) <= _MOST_ORDERS:
        yield from itertools.permutations(range(ranks))
        return
    middle = ranks // 2
    by_room = sorted(range(ranks), key=lambda rank: (room[rank, middle], rank))
    yield tuple(range(ranks))
    for order in (by_room, by_room[::-1]):
        for turn in range(ranks):
            yield tuple(order[turn:] + order[:turn])


def _best(
    order: Sequence[int], layers: int, room: dict[tuple[int, int], int], seconds: Callable[[int, int, int], float]
) -> tuple[int, ...] | None:
    """The layers of each stage with the least time of the slowest one; None where they do not fit."""
    # best[l]: (slowest, layers of each) over the stages so far, which hold l layers together
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage, rank in enumerate(order):
        left_after = len(order) - stage - 1  # stages, which hold at least a layer each, and at most so many
        most_after = sum(min(room[later, stage + 1 + number], layers) for number, later in enumerate(order[stage + 1 :]))
        own_s = [seconds(rank, stage, count) for count in range(min(room[rank, stage], layers) + 1)]
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for held, (slowest_s, chosen) in best.items():
            for count in range(max(1, layers - held - most_after), min(room[rank, stage], layers - held - left_after) + 1):
                slower_s = max(slowest_s, own_s[count])
                known = longer.get(held + count)
                if known is None or slower_s < known[0] or (slower_s == known[0] and (*chosen, count) < known[1]):
                    longer[held + count] = (slower_s, (*chosen, count))
        best = longer
    return best[layers][1] if layers in best else None
