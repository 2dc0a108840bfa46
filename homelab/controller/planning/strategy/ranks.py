"""The processes of a plan where every rank holds the whole model: its share, its micro-batch and what it holds in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.machines.machines import RankSlot
from homelab.controller.planning.memory import rank_memory, recipe_edits, scenario
from homelab.controller.planning.memory.attention import repeats_keys
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.memory.scenario import MemoryScenario, RankMemory
from homelab.controller.planning.memory.wsl import without_paging
from homelab.controller.planning.memory_estimate import MemoryEstimate
from homelab.controller.planning.speed.speed_profiles import SpeedProfile
from homelab.controller.planning.strategy import shares
from homelab.controller.planning.strategy.base import Assignment
from homelab.controller.planning.strategy.shares import CPU_MICRO_BATCH
from homelab.controller.planning.types import Choice, RankPlan
from homelab.controller.planning.work.job import Job, TrainingJob


def programs(job: Job) -> Assignment:
    """The ranks of a [script], whose work is not known."""
    return Assignment(tuple(rank_of(slot, share=0, micro_batch=0) for slot in job.machines.slots))


def whole_models(job: TrainingJob) -> Assignment:
    """Every rank with the whole model and its share of the batch. Raises InputError for shares that cannot be, DoesNotFit where no rank has room."""
    speeds, slots = job.workload.speeds, job.machines.slots
    counts, choices = shares.decide(job.recipe, job.workload, job.machines)
    caps, warnings = _token_caps(job)
    if job.shape is None and len(slots) > 1:
        warnings.append("no formula counts this model: shares go by speed alone, and what has room was not asked")
    ranks, reasons = [], []
    for slot, share in zip(slots, counts, strict=True):
        micro_batch, because = _micro_batch(job, slot, share)
        memory = memory_of(job, slot, micro_batch, caps.get(slot.rank))
        if memory is not None and memory.fits is False:
            warnings.append(_does_not_fit(slot, memory, is_capped=slot.rank in caps))
        reasons.append(Choice(subject=f"micro-batch of rank {slot.rank}", value=str(micro_batch), because=because))
        speed = speeds.speeds[slot.node.name][slot.local_rank] if speeds.speeds else None
        rank = rank_of(slot, share=share, micro_batch=micro_batch)
        ranks.append(rank.model_copy(update={"memory": memory, "speed": speed, "token_cap": caps.get(slot.rank)}))
    return Assignment(tuple(ranks), (*choices, *reasons), tuple(warnings))


def rank_of(slot: RankSlot, *, share: int, micro_batch: int) -> RankPlan:
    """The process in this place, with its work."""
    return RankPlan(
        rank=slot.rank, node=slot.node.name, local_rank=slot.local_rank, device_name=slot.name, share=share, micro_batch=micro_batch, card=slot.card,
        capability=slot.capability,
    )  # fmt: skip


def scenario_of(job: TrainingJob) -> MemoryScenario | None:
    """What every rank's memory depends on, with the ranks whose memory is known; None where none is."""
    ranks = []
    for slot in job.machines.slots:
        available, held_bytes = slot.memory()
        if available is not None:
            setup = setup_of(job, slot)
            ranks.append(RankMemory(slot.rank, slot.node.name, available, held_bytes, setup.repeats_keys, setup.measured))
    if job.shape is None or not ranks:
        return None
    pages = not without_paging(job.machines.names, job.machines.facts)
    return MemoryScenario(job.shape, job.precision, job.machines.device, job.machines.world_size, tuple(ranks), pages, job.division)


def _token_caps(job: TrainingJob) -> tuple[dict[int, int], list[str]]:
    """The longest row of every rank that has no room for one of seq_len, and the warnings. Raises DoesNotFit when no rank has room."""
    memory = scenario_of(job)
    if memory is None:
        return {}, []
    caps = {rank.rank: cap for rank in memory.ranks if (cap := scenario.token_cap(job.recipe, memory, rank)) is not None}
    if len(caps) == job.machines.world_size:
        raise recipe_edits.impossible(job.recipe, memory)
    seq_len = job.recipe.train.seq_len
    warnings = []
    for rank in memory.ranks:
        if caps.get(rank.rank):
            short = scenario.needed_bytes(job.recipe, memory, rank, tokens=seq_len) - rank.available_bytes
            warnings.append(
                f"rank {rank.rank} on {rank.node} has room for rows of up to {caps[rank.rank]} tokens of {seq_len}: longer ones "
                f"go to other ranks; for all of them it lacks {gigabytes(short)} GB: homelab plan RECIPE --fit"
            )
    return caps, warnings


def memory_of(job: TrainingJob, slot: RankSlot, micro_batch: int, token_cap: int | None) -> MemoryEstimate | None:
    """What the rank holds at its peak; None where the model's shape is not known."""
    if job.shape is None:
        return None
    train = replace(job.recipe.train, seq_len=token_cap or job.recipe.train.seq_len)
    items = rank_memory.estimate(job.shape, job.recipe.method, train, setup_of(job, slot, micro_batch))
    return MemoryEstimate(items=items, available_bytes=slot.memory()[0])


def _does_not_fit(slot: RankSlot, memory: MemoryEstimate, *, is_capped: bool) -> str:
    held_bytes, available = slot.memory()[1], memory.available_bytes or 0
    fix = "leave it out with --nodes, or homelab plan RECIPE --fit" if is_capped else "homelab plan RECIPE --fit, or a smaller micro_batch"
    return (
        f"rank {slot.rank} on {slot.node.name} needs about {gigabytes(memory.total_bytes - held_bytes)} GB, "
        f"{gigabytes(available - held_bytes)} GB are free, {gigabytes(memory.total_bytes - available)} GB too little: {fix}"
    )


def setup_of(job: TrainingJob, slot: RankSlot, micro_batch: int = 1) -> RankSetup:
    """What the memory of the rank in this place depends on."""
    device, machines = job.machines.device, job.machines
    return RankSetup(
        job.precision, device, micro_batch, machines.world_size, micro_batch > 1 or job.recipe.data.packing, job.recipe.parallel.compress,
        repeats_keys(device, job.precision, slot.capability), slot.memory()[1], _beside_torch(job.workload.speeds.files.get(slot.node.name), slot.local_rank),
        job.division,
    )  # fmt: skip


def _beside_torch(profile: SpeedProfile | None, local_rank: int) -> Mapping[str, int]:
    """What an earlier run has measured on the card beside torch's own memory, in place of the guesses; nothing where none has.

    What NCCL held is in it where that run had several ranks."""
    measured = profile.ranks[local_rank].beside_torch_bytes if profile is not None else None
    if profile is None or measured is None:
        return {}
    return {rank_memory.CONTEXT: measured} | ({rank_memory.COMMUNICATOR: 0} if profile.world_size > 1 else {})


def _micro_batch(job: TrainingJob, slot: RankSlot, share: int) -> tuple[int, str]:
    """Rows of a forward pass, and the reason."""
    setting, on_cpu = job.recipe.parallel.micro_batch, job.machines.device == "cpu"
    if setting != "auto":
        return min(setting, share), "the recipe says so" if setting <= share else f"the recipe says {setting}, its share is {share}"
    available = slot.memory()[0]
    if job.shape is None or available is None:
        return min(share, CPU_MICRO_BATCH if on_cpu else 1), "the memory is not known here: a small start value"
    setup = dataclasses.replace(setup_of(job, slot), masked=True if job.recipe.data.packing else None)
    most = rank_memory.largest_micro_batch(job.shape, job.recipe.method, job.recipe.train, setup, share=share, available_bytes=available)
    if on_cpu:
        return max(1, min(most, CPU_MICRO_BATCH, share)), f"as many as fit in memory; on a CPU more than {CPU_MICRO_BATCH} rows gain little"
    return max(1, most), "the largest that fits in the card's free memory" if most else "not even one row fits by the estimate"
