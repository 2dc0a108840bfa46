"""Who trains the adapters, transformers or Unsloth, and when the other would be worth a try. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning.model import Choice


def choices(recipe: Recipe, nodes: Sequence[Node], facts: Mapping[str, Facts], device: str, world_size: int) -> list[Choice]:
    """One line for the plan; none where everything is trained, or by a [script]: there is nothing to choose.

    "auto" is transformers, on any cluster: what trains a recipe must not depend on which package somebody has installed. It says where
    Unsloth would be taken: for adapters without dropout on one CUDA card alone, which is what its kernels are made for.
    """
    method = recipe.method
    if method is None or method.kind == "full":
        return []
    if method.backend != "auto":
        return [Choice(subject="trainer", value=method.backend, because="the recipe says so")]
    return [Choice(subject="trainer", value="transformers", because=f"auto; {_of_unsloth(method.dropout, nodes, facts, device, world_size)}")]


def _of_unsloth(dropout: float, nodes: Sequence[Node], facts: Mapping[str, Facts], device: str, world_size: int) -> str:
    """Why not, or how."""
    if device != "cuda":
        return "Unsloth would be taken for one CUDA card: its kernels are for cards"
    if world_size > 1:
        return f"Unsloth would be taken for one CUDA card alone, here are {world_size}: what its kernels do for several was never measured"
    if dropout > 0:
        return f"Unsloth would be taken for this one card without dropout: {dropout:g} turns its fused kernels off"
    (node,) = nodes
    if node.name not in facts:
        there = f"nobody has looked for it at {node.unsloth_python}"
    elif facts[node.name].unsloth:
        there = f"{facts[node.name].unsloth} is there, at {node.unsloth_python}"
    else:
        there = f"there is none at {node.unsloth_python}: README, Unsloth"
    return f'Unsloth would be taken for this one card: [method] backend = "unsloth" ({there})'
