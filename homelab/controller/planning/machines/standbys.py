"""Which nodes prepare the processes of the next attempt while they train (`homelab.node.run.standby`). Pure.

The node looks again when it comes to it: what is free then counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.base.units import binary_size
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.types import Choice, RankPlan
from homelab.shared.protocol.waiting_mark import RANK_BYTES

_CUDA_PROCESS_BYTES = 2 << 30  # of the host, with CUDA's libraries loaded: an assumption


def prepares(recipe: Recipe) -> bool:
    """Whether this run has such processes at all. Importing Unsloth takes the card; a program of one's own is not known."""
    recovery = recipe.recovery
    return recipe.script is None and recovery.auto and recovery.standby and recipe.method.backend != "unsloth"


def choices(recipe: Recipe, machines: Machines, ranks: Iterable[RankPlan]) -> tuple[Choice, ...]:
    """Who does, and who has not the memory for it; nothing where nobody is to."""
    if not prepares(recipe):
        return ()
    ranks = tuple(ranks)
    short = [
        node.name
        for node in machines.nodes
        if _is_short(machines, [rank for rank in ranks if rank.node == node.name], machines.facts.get(node.name))
    ]
    able = [name for name in machines.names if name not in short]
    because = f"the next attempt is prepared while this one trains, {binary_size(RANK_BYTES)} of memory a rank"
    return (
        Choice(
            subject="standby",
            value=", ".join(able) or "none",
            because=because + (f"; too little is free on {', '.join(short)}" if short else ""),
        ),
    )


def _is_short(machines: Machines, ranks: list[RankPlan], facts: Facts | None) -> bool:
    free = facts.system.memory_available_bytes if facts else None
    if facts is None or free is None:
        return False
    if facts.system.memory_limit_bytes is not None:
        free = min(free, facts.system.memory_limit_bytes - (facts.system.memory_limit_used_bytes or 0))
    held = sum(rank.memory.total_bytes if rank.memory and machines.device == "cpu" else _CUDA_PROCESS_BYTES for rank in ranks)
    return free < held + RANK_BYTES * len(ranks)
