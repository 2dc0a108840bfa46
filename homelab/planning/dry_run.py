"""Dry runs and the plan: which situations are worth one, and what their results say of every rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning import memory
from homelab.planning.architecture import Architecture
from homelab.planning.attention import repeats_keys
from homelab.planning.model import DryRun, MemoryEstimate, MemoryItem, Plan, RankPlan

_MOST = 4
_WORTH_A_LINE = 50_000  # bytes
_GB = 1e9


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a step's memory depends on, beside the recipe. Ranks that have it in common need one dry run."""

    device: str
    precision: str
    micro_batch: int
    seq_len: int
    masked: bool
    repeats_keys: bool = False


def situations(plan: Plan, recipe: Recipe) -> tuple[Wanted, ...]:
    """The different situations of the plan's ranks, the rank with the least room left first, at most four."""
    ranks = [rank for rank in plan.ranks if rank.memory is not None]
    ranks.sort(key=lambda rank: _headroom(rank.memory))
    return tuple(dict.fromkeys(wanted_of(plan, recipe, rank) for rank in ranks))[:_MOST]


def wanted_of(plan: Plan, recipe: Recipe, rank: RankPlan) -> Wanted:
    """A rank's own situation."""
    assert recipe.train is not None
    packed = recipe.data is not None and recipe.data.packing
    return Wanted(
        plan.device,
        plan.precision,
        rank.micro_batch,
        rank.token_cap or recipe.train.seq_len,
        rank.micro_batch > 1 or packed,
        repeats_keys(plan.device, plan.precision, rank.device_name),
    )


def able(facts: Mapping[str, Facts], recipe: Recipe) -> str | None:
    """The node to ask: it knows the model's config and has the packages; one that trains nothing now rather than another."""
    needed = ["torch", "transformers", "peft", "accelerate"]
    if recipe.method is not None and recipe.method.kind == "qlora":
        needed.append("bitsandbytes")
    names = [
        name
        for name, known in facts.items()
        if known.model and known.model.config and all(known.packages.get(package) for package in needed)
    ]
    return min(names, key=lambda name: bool(facts[name].runs_alive), default=None)


def applied(
    plan: Plan,
    recipe: Recipe,
    shape: Architecture,
    node: str,
    asked: Sequence[Wanted],
    results: Sequence[Mapping[str, Any]],
) -> Plan:
    """The plan with what the dry runs on `node` have found in place of the formulas; a rank without one of its own gets the
    formulas times what the nearest dry run came to. Says so in a warning where a rank turns out not to fit."""
    known = dict(zip(asked, results, strict=False))
    if not known:
        return plan
    ranks = tuple(_rank(plan, recipe, shape, node, known, rank) if rank.memory else rank for rank in plan.ranks)
    warnings = [
        f"rank {after.rank} on {after.node} does not fit by the dry run: {(after.memory.total_bytes - after.memory.available_bytes) / _GB:.1f} GB "
        "too little, where the formulas found room: homelab plan RECIPE --fit"
        for before, after in zip(plan.ranks, ranks, strict=True)
        if before.memory
        and after.memory
        and before.memory.fits
        and after.memory.fits is False
        and after.memory.available_bytes
    ]
    return plan.model_copy(update={"ranks": ranks, "warnings": (*plan.warnings, *warnings)})


def _rank(
    plan: Plan,
    recipe: Recipe,
    shape: Architecture,
    node: str,
    known: Mapping[Wanted, Mapping[str, Any]],
    rank: RankPlan,
) -> RankPlan:
    assert rank.memory is not None
    own = wanted_of(plan, recipe, rank)
    estimated = {item.name: item.size_bytes for item in rank.memory.items}
    if own in known:
        result = known[own]
        run = DryRun(
            node=node, peak_bytes=result["peak_bytes"], at=result["at"], seconds=result["seconds"],
            analytic_bytes=sum(estimated.get(name, 0) for name in memory.SEEN_BY_A_DRY_RUN),
        )  # fmt: skip
        found = {name: int(result["items"].get(name, 0)) for name in memory.SEEN_BY_A_DRY_RUN}
        found = {name: size if size >= _WORTH_A_LINE else 0 for name, size in found.items()}
        update: dict[str, Any] = {"dry_run": run}
    else:
        nearest = min(known, key=lambda other: abs(other.micro_batch * other.seq_len - own.micro_batch * own.seq_len))
        result = known[nearest]
        formulas = _items(plan, recipe, shape, nearest)
        factor = sum(result["items"].get(name, 0) for name in memory.MOVING) / max(
            1, sum(formulas.get(name, 0) for name in memory.MOVING)
        )
        found = {name: round(factor * estimated.get(name, 0)) for name in memory.MOVING}
        update = {"dry_run_scaled": factor}
    if plan.device == "cuda":
        found |= {name: estimated.get(name, 0) for name in memory.BESIDE_TORCH}
    items = _items(plan, recipe, shape, own, estimated.get(memory.HELD, 0), found)
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
    recipe: Recipe,
    shape: Architecture,
    wanted: Wanted,
    held_bytes: int = 0,
    measured: Mapping[str, int] | None = None,
) -> dict[str, int]:
    assert recipe.train is not None and recipe.method is not None
    items = memory.estimate(
        shape, recipe.method, recipe.train.model_copy(update={"seq_len": wanted.seq_len}), precision=wanted.precision, device=wanted.device,
        micro_batch=wanted.micro_batch, world_size=plan.world_size, masked=wanted.masked, compress=recipe.parallel.compress,
        repeats_keys=wanted.repeats_keys, held_by_others_bytes=held_bytes, measured=measured,
    )  # fmt: skip
    return {item.name: item.size_bytes for item in items}


def _headroom(found: MemoryEstimate | None) -> float:
    if found is None or found.available_bytes is None:
        return float("inf")
    return found.available_bytes - found.total_bytes
