"""Cards inside of WSL2, where Windows has the driver: how they differ when memory is short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.types import RankPlan

NEARLY_FULL = 0.85  # of the card; the estimate may be wrong by the rest


def without_paging(nodes: Iterable[str], facts: Mapping[str, Facts]) -> list[str]:
    """The nodes whose cards cannot use more than their memory: with Windows' driver there is no prefetch of managed memory and
    no going beyond the card's (CUDA C programming guide, "Unified Memory"; bitsandbytes issue 453)."""
    return [name for name in dict.fromkeys(nodes) if name in facts and facts[name].network.wsl]


def refuse_paging(recipe: Recipe, nodes: Iterable[str], facts: Mapping[str, Facts], device: str) -> None:
    """Raises InputError for an optimizer with paged state where a card of `nodes` cannot page."""
    inside = without_paging(nodes, facts)
    if device == "cuda" and isinstance(recipe, TrainRecipe) and recipe.train.optimizer == "paged_adamw_8bit" and inside:
        raise InputError(
            f"paged_adamw_8bit cannot page on {', '.join(inside)}: the driver of WSL2 does not page",
            where="recipe, [train] optimizer",
            hint='set optimizer = "adamw_8bit", which has the same results, or start Linux itself on that machine',
        )


def warnings_of(ranks: Iterable[RankPlan], facts: Mapping[str, Facts], device: str) -> Iterator[str]:
    """Warnings for ranks that nearly fill a card whose driver pages without an error."""
    for rank in ranks:
        node_facts, memory = facts.get(rank.node), rank.memory
        if device != "cuda" or node_facts is None or not node_facts.network.wsl or memory is None or not memory.available_bytes:
            continue
        if memory.total_bytes > NEARLY_FULL * memory.available_bytes:
            yield (
                f"rank {rank.rank} on {rank.node} fills {memory.total_bytes / memory.available_bytes:.0%} of its card from inside of WSL2: what "
                "does not fit goes to the machine's memory without an error, and is ten times slower. In Windows, NVIDIA Control Panel, Manage "
                "3D settings: CUDA - Sysmem Fallback Policy = Prefer No Sysmem Fallback"
            )
