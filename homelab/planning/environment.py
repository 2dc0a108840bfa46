"""The environment variables of a person beside those of the plan: the recipe's for all nodes, cluster.toml's for one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homelab.config.cluster import Node
from homelab.config.environment import differing
from homelab.config.recipe import Recipe
from homelab.errors import InputError
from homelab.planning.cuda import ALLOCATOR
from homelab.planning.model import Choice


def merged(ours: Mapping[str, str], recipe: Recipe, node: Node) -> dict[str, str]:
    """The variables of a node's ranks: what a person says goes before `ours`, and of a person the node before the recipe."""
    theirs = {**recipe.environment, **node.environment}
    replaced = ALLOCATOR if any(name in theirs for name in ALLOCATOR) else ()
    return {**{name: value for name, value in ours.items() if name not in replaced}, **theirs}


def told(nodes: Sequence[Node], recipe: Recipe) -> list[Choice]:
    """Which variables are a person's, as choices of the plan."""
    found = []
    if recipe.environment:
        found.append(Choice(subject="environment", value=", ".join(recipe.environment), because="the recipe sets them for all nodes"))
    for node in nodes:
        if node.environment:
            because = f"`environment` of {node.name} in cluster.toml"
            found.append(Choice(subject=f"environment of {node.name}", value=", ".join(node.environment), because=because))
    return found


def refuse_unequal(environments: Mapping[str, Mapping[str, str]]) -> None:
    """Raises InputError where the ranks' environments, by node, differ in what NCCL wants equal on all of them."""
    found = differing(environments)
    if found:
        variable, first, second = found
        raise InputError(
            f"{variable} is not the same on {first} and {second}, and all ranks of NCCL have to agree on it: they would hang or fail",
            where=f"cluster.toml, nodes {first} and {second}, environment",
            hint=f"edit cluster.toml: {variable} under [defaults.environment] and nowhere else; or set it in the recipe, [environment]",
        )
