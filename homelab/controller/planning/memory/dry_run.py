"""Dry runs and the plan: which situations are worth one, and what their results say of every rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import division, rank_memory
from homelab.controller.planning.memory.attention import repeats_keys_of
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.memory_estimate import DryRun, MemoryEstimate, MemoryItem
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.types import Plan, RankPlan
from homelab.shared.protocol import memory_items

_MOST = 4
_WORTH_A_LINE = 50_000  # bytes
_GB = 1e9


@dataclass(frozen=True, slots=True)
class DryRunCase:
    """What a step's memory depends on, beside the recipe. Ranks that have it in common need one dry run."""

    device: str
    precision: str
    micro_batch: int
    seq_len: int
    masked: bool
    repeats_keys: bool = False


def situations(plan: Plan, recipe: TrainRecipe) -> tuple[DryRunCase, ...]:
    """The different situations of the plan's ranks, the rank with the least room left first, at most four. None for a part of the layers: a dry run is of a whole model."""
    ranks = [rank for rank in plan.ranks if rank.holds_all_layers]
    ranks.sort(key=lambda rank: _headroom(rank.memory))
    return tuple(dict.fromkeys(wanted_of(plan, recipe, rank) for rank in ranks))[:_MOST]


def wanted_of(plan: Plan, recipe: TrainRecipe, rank: RankPlan) -> DryRunCase:
    """A rank's own situation."""
    packed = recipe.data.packing
    return DryRunCase(
        plan.device,
        plan.precision,
        rank.micro_batch,
        rank.token_cap or recipe.train.seq_len,
        rank.micro_batch > 1 or packed,
        repeats_keys_of(plan, rank),
    )


def able(facts: Mapping[str, Facts], recipe: TrainRecipe, *, is_told: bool = False) -> str | None:
    """The node to ask: it knows the model's config (or is told it) and has the packages; one that trains nothing now rather than another."""
    knowing = [name for name, of in facts.items() if of.model and of.model.config]
    return _free(facts, recipe, knowing) if knowing or not is_told else _free(facts, recipe, list(facts))


def able_to_fetch(facts: Mapping[str, Facts], recipe: TrainRecipe) -> str | None:
    """The same of a hub model that no node has: one that may ask the hub."""
    missing = [of.model for of in facts.values() if of.model is not None and not of.model.config and not of.model.found]
    if recipe.model.is_folder or len(missing) < len(facts):
        return None
    return _free(facts, recipe, [name for name, of in facts.items() if of.model and of.model.hub in (None, "ok")])


def _free(facts: Mapping[str, Facts], recipe: TrainRecipe, names: Sequence[str]) -> str | None:
    needed = ["torch", "transformers", "peft", "accelerate"]
    if recipe.method.quantisation:
        needed.append("bitsandbytes")
    able = [name for name in names if all(facts[name].python.packages.get(package) for package in needed)]
    return min(able, key=lambda name: bool(facts[name].runs.alive), default=None)


def applied(
    plan: Plan, recipe: TrainRecipe, shape: Architecture, node: str, cases: Sequence[DryRunCase], results: Sequence[Mapping[str, Any]]
) -> Plan:
    """The plan with what the dry runs on `node` have found in place of the formulas; a rank without one of its own gets the
    formulas times what the nearest dry run came to. Says so in a warning where a rank turns out not to fit."""
    results_of = dict(zip(cases, results, strict=False))
    if not results_of:
        return plan
    ranks = tuple(_rank(plan, recipe, shape, node, results_of, rank) if rank.memory else rank for rank in plan.ranks)
    warnings = [
        f"rank {after.rank} on {after.node} does not fit by the dry run: {(after.memory.total_bytes - after.memory.available_bytes) / _GB:.1f} GB "
        "too little, although the formulas found room: homelab plan RECIPE --fit"
        for before, after in zip(plan.ranks, ranks, strict=True)
        if before.memory and after.memory and before.memory.fits and after.memory.fits is False and after.memory.available_bytes
    ]
    return plan.model_copy(update={"ranks": ranks, "warnings": (*plan.warnings, *warnings)})


def without_shape(
    plan: Plan, recipe: TrainRecipe, node: str, cases: Sequence[DryRunCase], results: Sequence[Mapping[str, Any]], free: Mapping[int, tuple[int | None, int]]
) -> Plan:  # fmt: skip
    """The plan of a model that no formula knows: a rank has the memory of its own dry run, beside what torch does not see. `free`: rank -> (its
    memory, what of it others hold)."""
    results_of = dict(zip(cases, results, strict=False))
    if not results_of:
        return plan
    ranks, warnings = [], []
    for rank in plan.ranks:
        result = results_of.get(wanted_of(plan, recipe, rank))
        if result is not None:
            available, held_bytes = free.get(rank.rank, (None, 0))
            sizes = {name: int(size) for name, size in result["items"].items() if size} | rank_memory.beside(
                plan.device, plan.world_size, result["items"]
            )
            items = tuple(MemoryItem(name=name, size_bytes=size) for name, size in {**sizes, memory_items.HELD: held_bytes}.items() if size)
            run = DryRun(
                node=node, peak_bytes=result["peak_bytes"], at=result["at"], seconds=result["seconds"], analytic_bytes=result["peak_bytes"]
            )
            rank = rank.model_copy(update={"memory": MemoryEstimate(items=items, available_bytes=available, dry_run=run)})
        if rank.memory is not None and rank.memory.fits is False and rank.memory.available_bytes:
            lacking = (rank.memory.total_bytes - rank.memory.available_bytes) / _GB
            warnings.append(f"rank {rank.rank} on {rank.node} does not fit by the dry run: {lacking:.1f} GB too little")
        ranks.append(rank)
    trained = next(iter(results))["items"].get(memory_items.ADAPTERS, 0) // rank_memory.TRAINED_BYTES
    weights = f", which trains {trained:,} weights" if trained else ""
    note = [f"the planner knows no formulas for this model: its memory is that of a dry run on {node}{weights}; its time is not known"]
    return plan.model_copy(update={"ranks": tuple(ranks), "warnings": (*plan.warnings, *note, *warnings)})


def _rank(
    plan: Plan, recipe: TrainRecipe, shape: Architecture, node: str, results_of: Mapping[DryRunCase, Mapping[str, Any]], rank: RankPlan
) -> RankPlan:
    assert rank.memory is not None
    own = wanted_of(plan, recipe, rank)
    estimated = {item.name: item.size_bytes for item in rank.memory.items}
    if own in results_of:
        result = results_of[own]
        run = DryRun(
            node=node, peak_bytes=result["peak_bytes"], at=result["at"], seconds=result["seconds"],
            analytic_bytes=sum(estimated.get(name, 0) for name in rank_memory.SEEN_BY_A_DRY_RUN),
        )  # fmt: skip
        sizes = {name: int(result["items"].get(name, 0)) for name in rank_memory.SEEN_BY_A_DRY_RUN}
        sizes = {name: size if size >= _WORTH_A_LINE else 0 for name, size in sizes.items()}
        update: dict[str, Any] = {"dry_run": run}
    else:
        nearest = min(results_of, key=lambda other: abs(other.micro_batch * other.seq_len - own.micro_batch * own.seq_len))
        result = results_of[nearest]
        formulas = _items(plan, recipe, shape, nearest)
        factor = sum(result["items"].get(name, 0) for name in rank_memory.MOVING) / max(
            1, sum(formulas.get(name, 0) for name in rank_memory.MOVING)
        )
        sizes = {name: round(factor * estimated.get(name, 0)) for name in rank_memory.MOVING}
        update = {"dry_run_scaled": factor}
    if plan.device == "cuda":
        sizes |= {name: estimated.get(name, 0) for name in rank_memory.BESIDE_TORCH}
    items = _items(plan, recipe, shape, own, estimated.get(memory_items.HELD, 0), sizes)
    return rank.model_copy(
        update={
            "memory": MemoryEstimate(
                items=tuple(MemoryItem(name=name, size_bytes=size) for name, size in items.items()),
                available_bytes=rank.memory.available_bytes,
                **update,
            )
        }
    )


def _items(
    plan: Plan,
    recipe: TrainRecipe,
    shape: Architecture,
    case: DryRunCase,
    held_bytes: int = 0,
    measured: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    setup = RankSetup(
        case.precision, case.device, case.micro_batch, plan.world_size, case.masked, recipe.parallel.compress, case.repeats_keys,
        held_bytes, measured, division.of(plan.strategy, [rank.node for rank in plan.ranks]),
    )  # fmt: skip
    items = rank_memory.estimate(shape, recipe.method, replace(recipe.train, seq_len=case.seq_len), setup)
    return {item.name: item.size_bytes for item in items}


def _headroom(memory: MemoryEstimate | None) -> float:
    if memory is None or memory.available_bytes is None:
        return float("inf")
    return memory.available_bytes - memory.total_bytes
