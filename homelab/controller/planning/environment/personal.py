"""The environment variables of a person beside those of the plan: the recipe's for all nodes, cluster.toml's for one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import Node
from homelab.controller.config.environment import differing
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.environment.cuda import ALLOCATOR
from homelab.controller.planning.types import Choice

# Names of one thing: where a person sets one of them, none of ours is set beside it. NCCL takes the tighter one of two limits of its channels.
_ONE_THING = (ALLOCATOR, ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS"))


def merged(defaults: Mapping[str, str], recipe: Recipe, node: Node) -> dict[str, str]:
    """The variables of a node's ranks: a person's variables replace `defaults`, and those of cluster.toml replace those of the recipe."""
    personal = {**recipe.environment, **node.environment}
    replaced = {name for names in _ONE_THING if any(name in personal for name in names) for name in names}
    return {**{name: value for name, value in defaults.items() if name not in replaced}, **personal}


def choices(nodes: Sequence[Node], recipe: Recipe) -> list[Choice]:
    """The variables that a person sets, as choices of the plan."""
    reasons = []
    if recipe.environment:
        reasons.append(Choice(subject="environment", value=", ".join(recipe.environment), because="the recipe sets them for all nodes"))
    for node in nodes:
        if node.environment:
            because = f"`environment` of {node.name} in cluster.toml"
            reasons.append(Choice(subject=f"environment of {node.name}", value=", ".join(node.environment), because=because))
    return reasons


def refuse_unequal(environments: Mapping[str, Mapping[str, str]]) -> None:
    """Raises InputError where the ranks' environments, by node, differ in what NCCL wants equal on all of them."""
    difference = differing(environments)
    if difference:
        variable, first, second = difference
        raise InputError(
            f"{variable} differs between {first} and {second}, and all ranks of NCCL need the same value: they would hang or fail",
            where=f"cluster.toml, nodes {first} and {second}, environment",
            hint=f"edit cluster.toml: {variable} only under [defaults.environment]; or set it in the recipe, [environment]",
        )
