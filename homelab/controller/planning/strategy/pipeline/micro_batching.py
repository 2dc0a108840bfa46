"""One size of micro-batches on the machines of a training: how many layers fit where, and what every stage of a cut takes. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from homelab.controller.planning.machines import host_room
from homelab.controller.planning.machines.host_room import HostRoom
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.memory import streamed_memory
from homelab.controller.planning.memory_estimate import MemoryItem, StreamingPlan
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.pipeline import stage_memory, stage_time
from homelab.controller.planning.strategy.pipeline.stage_memory import Part
from homelab.controller.planning.strategy.pipeline.stage_time import Costs, StageTimes
from homelab.controller.planning.time import network_cost, step_time
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.law import pipeline_schedule
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.shared.recipe import Train

_SAME_MACHINE_BYTES_PER_S = 5e9  # through host memory; assumed
InFlight = Callable[[int, int], int]  # of (stage, stages)


@dataclass(frozen=True)
class MicroBatching:
    """A training whose micro-batches have `rows` rows. `streams`: layers without room come from a rank's host."""

    job: TrainingJob
    rows: int
    streams: bool = False

    @cached_property
    def shape(self) -> Architecture:
        """The model, as one of equal layers; of wide attention, layers in a row are counted as they are."""
        shape = self.job.shape
        equal = shape.equal if shape is not None else None
        assert shape is not None and equal is not None, "a pipeline needs a model of known shape"
        return shape if shape.wide is not None else equal

    @cached_property
    def slots(self) -> tuple[RankSlot, ...]:
        """The places of the ranks."""
        return self.job.machines.slots

    @property
    def stages(self) -> int:
        """As many as ranks."""
        return len(self.slots)

    @cached_property
    def costs(self) -> Costs:
        """What layers and head are of a pass."""
        recipe = self.job.recipe
        return stage_time.costs_of(self.shape, recipe.method, recipe.train, self.job.workload.rows.loss_part)

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """The tokens of each micro-batch of a typical step, by the worker's own rule."""
        recipe, data = self.job.recipe, self.job.workload.rows
        limits = Limits.planned(self.rows, None, seq_len=recipe.train.seq_len, asked=recipe.parallel.micro_batch, padded=bool(data.padded))
        first = step_time.Worker(0, "", "", Speed(0.0, 0.0, 1.0), limits, recipe.train.global_batch)
        lengths = data.lengths(recipe.train.global_batch, recipe.train.seq_len)
        return tuple(step_time.passes_of([first], lengths, [recipe.train.global_batch])[0])

    @cached_property
    def speeds(self) -> list[Speed]:
        """Of the whole model on each rank. Where no seconds are known they are relative."""
        estimate = self.job.workload.speeds
        if estimate.speeds is None:
            return [Speed(0.0, 0.0, 1 / estimate.weights[slot.node.name][slot.local_rank]) for slot in self.slots]
        slowdown = estimate.slowdown("pipeline", self.stages)
        return [estimate.speeds[slot.node.name][slot.local_rank].slower(slowdown) for slot in self.slots]

    @cached_property
    def _passes_s(self) -> list[list[float]]:
        """What each micro-batch takes of the whole model, of each rank: asked for with every count of layers."""
        return [[speed.pass_s(tokens) for tokens in self.passes] for speed in self.speeds]

    def seconds(self, rank: int, stage: int, layers: int) -> float:
        """What so many layers take of a step on this rank, as this stage."""
        if self.streaming(rank, stage, layers, 1) is None:
            return self.costs.work(layers, is_last=self._is_last(stage)) * sum(self._passes_s[rank])
        times = self._times_of(rank, stage, layers, 1)
        return sum(times.forward_s) + sum(times.backward_s)

    def items(self, rank: int, stage: int, layers: int, in_flight: int) -> tuple[MemoryItem, ...]:
        """What the rank holds with so many layers, as this stage."""
        streaming = self.streaming(rank, stage, layers, in_flight)
        if not streaming:
            return self._resident(rank, stage, layers, in_flight)
        return self._streamed(rank, stage, layers, in_flight, streaming.layers)

    def streaming(self, rank: int, stage: int, layers: int, in_flight: int) -> StreamingPlan | None:
        """What of so many layers comes from the rank's host; None where it has room for them, or no room even so."""
        if not self.streams or not layers:
            return None
        asked = rank, stage, layers, in_flight
        if asked not in self._streamings:
            self._streamings[asked] = self._streaming_of(*asked)
        return self._streamings[asked]

    @cached_property
    def _streamings(self) -> dict[tuple[int, int, int, int], StreamingPlan | None]:
        return {}

    def _streaming_of(self, rank: int, stage: int, layers: int, in_flight: int) -> StreamingPlan | None:
        available = self.slots[rank].memory()[0]
        if available is None:
            return None
        if sum(item.size_bytes for item in self._resident(rank, stage, layers, in_flight)) <= available:
            return None
        count = streamed_memory.fewest(self._streamed(rank, stage, layers, in_flight, 0), self._layer_bytes, available, layers)
        if not count:
            return None
        inputs = 0 if self._kept_layers(layers) else layers * in_flight
        taking = (room for room in self._rooms[rank] if room.takes(count, self._layer_bytes, inputs, self._boundary_bytes(rank)))
        room = next(taking, None)
        return room.plan(count, self._layer_bytes, 1) if room is not None else None

    def _resident(self, rank: int, stage: int, layers: int, in_flight: int) -> tuple[MemoryItem, ...]:
        return self._estimate(self.shape, self.job.recipe.train, rank, stage, layers, in_flight)

    def _streamed(self, rank: int, stage: int, layers: int, in_flight: int, count: int) -> tuple[MemoryItem, ...]:
        train = dataclasses.replace(self.job.recipe.train, gradient_checkpointing=True)
        largest = self.shape.equal
        assert largest is not None
        items = self._estimate(largest, train, rank, stage, layers, in_flight)
        return streamed_memory.on_device(items, self._layer_bytes, self._boundary_bytes(rank), count, in_flight, self._kept_layers(layers))

    def _estimate(self, shape: Architecture, train: Train, rank: int, stage: int, layers: int, in_flight: int) -> tuple[MemoryItem, ...]:
        setup, part = ranks.setup_of(self.job, self.slots[rank], self.rows), Part(layers, stage == 0, self._is_last(stage))
        return stage_memory.estimate(shape, self.job.recipe.method, train, setup, part, in_flight)

    def _kept_layers(self, layers: int) -> int:
        return 0 if self.job.machines.device == "cuda" else layers

    @cached_property
    def _layer_bytes(self) -> int:
        return streamed_memory.layer_bytes(self.shape, self.job.recipe.method, self.job.precision)

    def _boundary_bytes(self, rank: int) -> int:
        return streamed_memory.boundary_bytes(self.shape, self.job.recipe.train, ranks.setup_of(self.job, self.slots[rank], self.rows))

    @cached_property
    def _rooms(self) -> list[Sequence[HostRoom]]:
        names = [slot.node.name for slot in self.slots]
        return [host_room.rooms_of(slot, names.count(slot.node.name)) for slot in self.slots]

    def fits(self, rank: int, stage: int, layers: int, in_flight: int) -> bool:
        """Whether the rank has room for that; yes where its memory is not known."""
        available = self.slots[rank].memory()[0]
        return available is None or sum(item.size_bytes for item in self.items(rank, stage, layers, in_flight)) <= available

    def most_layers(self, rank: int, stage: int, flights: InFlight) -> int:
        """How many layers have room on this rank as this stage; 0: not even one."""
        in_flight = min(flights(stage, self.stages), len(self.passes))
        low, high = 0, self.shape.layers
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(rank, stage, middle, in_flight) else (low, middle - 1)
        return low

    def in_flight(self, order: Sequence[int], layers: Sequence[int]) -> tuple[int, ...]:
        """Micro-batches that each stage keeps: as many as hide a message, fewer where memory is short, never more than the stage before, and
        only a few more than the next one."""
        result: list[int] = []
        for stage, (rank, count) in enumerate(zip(order, layers, strict=True)):
            flight = min(pipeline_schedule.most_in_flight(stage, self.stages), len(self.passes), *result[-1:])
            while flight > 1 and not self.fits(rank, stage, count, flight):
                flight -= 1
            result.append(flight)
        return pipeline_schedule.never_stuck(result)

    def times(self, order: Sequence[int], layers: Sequence[int], in_flight: Sequence[int]) -> list[StageTimes]:
        """The passes and messages of every stage."""
        times = []
        for stage, (rank, count) in enumerate(zip(order, layers, strict=True)):
            messages = [0.0 if self._is_last(stage) else self._message_s(rank, order[stage + 1], tokens) for tokens in self.passes]
            own = self._times_of(rank, stage, count, in_flight[stage])
            times.append(dataclasses.replace(own, message_s=messages))
        return times

    def _times_of(self, rank: int, stage: int, layers: int, in_flight: int) -> StageTimes:
        """The passes of a stage. Each waits for the streamed layers where these take longer than it computes."""
        whole, streaming = self._passes_s[rank], self.streaming(rank, stage, layers, in_flight)
        least_s = streaming.host_bytes / streaming.bytes_per_s if streaming else 0.0
        forward, backward = (part(layers, is_last=self._is_last(stage)) for part in (self.costs.forward, self.costs.backward))
        return StageTimes([max(least_s, forward * one) for one in whole], [max(least_s, backward * one) for one in whole], [], in_flight)

    def table_s(self, order: Sequence[int]) -> float:
        """Seconds after the passes in which first and last stage exchange the gradient of the table that both train."""
        return stage_memory.table_bytes(self.shape, self.job.recipe) / self._bytes_per_s(order[0], order[-1])

    def _is_last(self, stage: int) -> bool:
        return stage == self.stages - 1

    def _message_s(self, rank: int, other: int, tokens: int) -> float:
        return stage_memory.message_bytes(self.shape, self.job.recipe.method, self.job.precision, tokens) / self._bytes_per_s(rank, other)

    def _bytes_per_s(self, rank: int, other: int) -> float:
        names = {self.slots[rank].node.name, self.slots[other].node.name}
        return network_cost.wire_between(names, self.job.throughputs).bytes_per_s if len(names) > 1 else _SAME_MACHINE_BYTES_PER_S
