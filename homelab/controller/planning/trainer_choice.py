"""The library that trains the adapters, transformers or Unsloth, and when the other is worth a try. Pure."""

from __future__ import annotations

from homelab.controller.config.recipe import Recipe, ScriptRecipe
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.types import Choice


def choices(recipe: Recipe, machines: Machines) -> list[Choice]:
    """One line for the plan; none where everything is trained, or by a [script]: there is nothing to choose.

    "auto" is transformers, on any cluster: the library must not depend on which packages are installed. The reason says where
    Unsloth would be taken: for adapters without dropout on one CUDA card alone, which is what its kernels are made for.
    """
    if isinstance(recipe, ScriptRecipe) or recipe.method.kind == "full":
        return []
    method = recipe.method
    if method.backend != "auto":
        return [Choice(subject="trainer", value=method.backend, because="the recipe says so")]
    return [Choice(subject="trainer", value="transformers", because=f"auto; {_of_unsloth(method.dropout, machines)}")]


def _of_unsloth(dropout: float, machines: Machines) -> str:
    """Why Unsloth is not taken, or how to take it."""
    world_size, facts = machines.world_size, machines.facts
    if machines.device != "cuda":
        return "Unsloth would be taken for one CUDA card: its kernels are for cards"
    if world_size > 1:
        return f"Unsloth would be taken for one CUDA card alone, here are {world_size}: what its kernels do for several was never measured"
    if dropout > 0:
        return f"Unsloth would be taken for this one card without dropout: {dropout:g} turns its fused kernels off"
    (node,) = machines.nodes
    if node.name not in facts:
        state = f"nobody has looked for it at {node.unsloth_python}"
    elif facts[node.name].python.unsloth:
        state = f"{facts[node.name].python.unsloth} is there, at {node.unsloth_python}"
    else:
        state = f"there is none at {node.unsloth_python}: homelab setup {node.name} --unsloth"
    return f'Unsloth would be taken for this one card: [method] backend = "unsloth" ({state})'
