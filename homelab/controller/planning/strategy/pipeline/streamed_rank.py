"""A rank that is alone with a model for which its device has no room: the rest of the layers come from its host. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.machines import host_room
from homelab.controller.planning.machines.host_room import HostRoom
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.memory import rank_memory, streamed_memory
from homelab.controller.planning.memory_estimate import MemoryEstimate, StreamingPlan
from homelab.controller.planning.strategy import ranks
from homelab.controller.planning.strategy.base import Assignment
from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching
from homelab.controller.planning.types import Choice
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.law.streaming import DISK, WORDS

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_AS_FAST = 1.03  # of these, the one that streams the fewest layers: the rates of transfers are not measured
_GROUPS_BYTES = 4 * 2**30  # of a host's memory that the layers' inputs take at most, before groups get smaller


@dataclass(frozen=True)
class StreamedRank:
    """A rank with micro-batches of so many rows, what its device holds, what comes from its host (None: it has room for all), and seconds of a step
    (0 where no speed is known)."""

    slot: RankSlot
    rows: int
    memory: MemoryEstimate
    streaming: StreamingPlan | None
    step_s: float

    @property
    def last_resort(self) -> int:
        """0: all layers stay. The rates of the later rooms are assumed, so what is faster by them alone is not taken."""
        return 0 if self.streaming is None else 1 + list(WORDS).index(self.streaming.host)


def why_not(job: TrainingJob) -> str | None:
    """Why no layer of this training can come from the host; None where some can."""
    method = job.recipe.method
    if method.kind == "full":
        return "all weights are trained"
    if method.backend == "unsloth":
        return "Unsloth loads its own model"
    return None


def layer_bytes_of(job: TrainingJob) -> int:
    """The frozen weights of one layer."""
    assert job.shape is not None
    return streamed_memory.layer_bytes(job.shape, job.recipe.method, job.precision)


def why_hosts_do_not_help(job: TrainingJob) -> str:
    """The end of an error about memory: why no layer comes from a host, or what room the hosts have beside what a device must hold itself. Empty where
    nobody asked them."""
    reason = why_not(job)
    if reason is not None:
        return f"; layers cannot come from a host: {reason}"
    slots = job.machines.slots
    rooms = {slot.node.name: host_room.rooms_of(slot, 1) for slot in slots}
    known = [
        f"{gigabytes(room.bytes_free)} GB of {WORDS[room.kind]} on {name}"
        for name, of_it in rooms.items()
        for room in of_it
        if room.bytes_free is not None
    ]
    if not known:
        return ""
    stays = "a device must hold embeddings, head, adapters and two layers itself"
    return f"; layers from the hosts do not help: these have room for {', '.join(known)}, and {stays}"


def alone(job: TrainingJob) -> Assignment | None:
    """The plan of one rank whose device lacks room for all layers; None where it has room, or where streaming does not help."""
    (slot,) = job.machines.slots
    best = fastest_on(job, slot)
    if best is None or best.streaming is None:
        return None
    batch, speeds = job.recipe.train.global_batch, job.workload.speeds
    speed = speeds.speeds[slot.node.name][slot.local_rank] if speeds.speeds else None
    rank = ranks.rank_of(slot, share=batch, micro_batch=best.rows).model_copy(
        update={"memory": best.memory, "speed": speed, "streaming": best.streaming}
    )
    because = "its memory has no room for all of them; each comes once in each direction for all passes of a group"
    return Assignment((rank,), (speeds.choice, Choice(subject="layers", value=best.streaming.text, because=because)))


def fastest_on(job: TrainingJob, slot: RankSlot) -> StreamedRank | None:
    """The fastest way to train the whole model in this place alone, resident if that has room in any way, and from the best room of its host; None where
    there is none, or its memory is not known."""
    batch, asked = job.recipe.train.global_batch, job.recipe.parallel.micro_batch
    sizes = [min(asked, batch)] if asked != "auto" else [rows for rows in _MICRO_BATCHES if rows <= batch]
    found = [one for rows in sizes if (one := _with_rows(job, slot, rows)) is not None]
    best = min((one.last_resort for one in found), default=0)
    found = [one for one in found if one.last_resort == best]
    as_fast = [one for one in found if one.step_s <= _AS_FAST * min(other.step_s for other in found)]
    return min(as_fast, key=lambda one: (one.streaming.layers if one.streaming else 0, one.step_s, one.rows), default=None)


def _with_rows(job: TrainingJob, slot: RankSlot, rows: int) -> StreamedRank | None:
    method, train, available_bytes = job.recipe.method, job.recipe.train, slot.memory()[0]
    is_mixed = job.shape is not None and (job.shape.delta is not None or job.shape.wide is not None)
    shape = job.shape.equal if job.shape is not None and is_mixed else job.shape
    if shape is None or available_bytes is None or why_not(job) is not None:
        return None
    passes, setup = MicroBatching(job, rows).passes, dataclasses.replace(ranks.setup_of(job, slot, rows), world_size=1)
    speeds = job.workload.speeds.speeds
    compute_s = speeds[slot.node.name][slot.local_rank].seconds(passes) if speeds is not None else 0.0
    resident = rank_memory.estimate(shape, method, train, setup)
    if sum(item.size_bytes for item in resident) <= available_bytes:
        return StreamedRank(slot, rows, MemoryEstimate(items=resident, available_bytes=available_bytes), None, compute_s)
    layer_bytes, boundary_bytes = layer_bytes_of(job), streamed_memory.boundary_bytes(shape, train, setup)
    items = rank_memory.estimate(shape, method, dataclasses.replace(train, gradient_checkpointing=True), setup)
    kept_layers = 0 if slot.device == "cuda" else shape.layers
    largest = max(1, min(len(passes), _GROUPS_BYTES // (shape.layers * boundary_bytes)))
    tries = ((room, group) for room in host_room.rooms_of(slot, 1) for group in _groups(len(passes), room, largest))
    for room, group in tries:  # smaller groups need less of the device and of the host
        on_device = functools.partial(streamed_memory.on_device, items, layer_bytes, boundary_bytes, group=group, kept_layers=kept_layers)
        count = streamed_memory.fewest(on_device(0), layer_bytes, available_bytes, shape.layers)
        if count and room.takes(count, layer_bytes, 0 if kept_layers else shape.layers * group, boundary_bytes):
            streaming = room.plan(count, layer_bytes, group)
            memory = MemoryEstimate(items=on_device(count), available_bytes=available_bytes)
            return StreamedRank(slot, rows, memory, streaming, streaming.step_s(compute_s, len(passes)))
    return None


def _groups(passes: int, room: HostRoom, largest: int) -> Sequence[int]:
    """Sizes of groups, falling, each with fewer loads than all smaller ones. The inputs of a group may take all memory beside layers that lie on the disk."""
    is_beside_a_disk = room.kind == DISK and room.pinned_free is not None
    sizes = {-(-passes // groups) for groups in range(1, passes + 1)}
    return sorted((size for size in sizes if is_beside_a_disk or size <= largest), reverse=True)
