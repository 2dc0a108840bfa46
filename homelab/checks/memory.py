"""memory: the machine's RAM, for loading the model. Whether a step fits is the plan's to say, item by item."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks import training_size
from homelab.checks.commands import GIB, answered, binary_size, on_node
from homelab.checks.evidence import Evidence, Finding
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning.memory import PROCESS_BYTES

ID = "memory"
# A process with CUDA's libraries loaded; weights go straight to the card, shard by shard, from a memory map. An assumption.
CUDA_PROCESS_BYTES = 2 * GIB
_TIGHT = 1.1


def judge(evidence: Evidence) -> Iterator[Finding]:
    """fail where not even the process and the weights fit into the memory that is free, warn where it is within 10 %."""
    for node, facts in answered(evidence):
        available = facts.memory_available_bytes
        if available is None:
            yield Finding(ID, node.name, "ok", "free memory is not known")
            continue
        need = least_bytes(evidence.recipe, node, facts)
        if available >= _TIGHT * need:
            yield Finding(ID, node.name, "ok", f"{binary_size(available)} free")
            continue
        message = f"{binary_size(available)} of memory is free, this needs {binary_size(need)} at the least"
        hint = f"close what holds it; to see it: {on_node(node, 'ps -eo rss,user,args --sort=-rss | head')}"
        if evidence.recipe and evidence.recipe.method and not node.gpus:
            hint += "; or edit the recipe: a smaller [model]" + (
                ', or [method] kind = "qlora"' if evidence.recipe.method.kind != "qlora" else ""
            )
        yield Finding(ID, node.name, "fail" if available < need else "warn", message, hint)


def least_bytes(recipe: Recipe | None, node: Node, facts: Facts) -> int:
    """A lower bound of the RAM this node's ranks hold. On a CPU node the training itself lies there too."""
    if node.gpus:
        return CUDA_PROCESS_BYTES * node.rank_count
    size = training_size.of_recipe(recipe, facts)
    return PROCESS_BYTES + (size.training_bytes if size else 0)
