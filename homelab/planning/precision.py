"""The precision of a training, where the recipe leaves it to the cluster."""

from __future__ import annotations

from homelab import hardware
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe, TrainRecipe
from homelab.planning.machines import Machines
from homelab.planning.types import Choice


def choose(recipe: Recipe, machines: Machines) -> Choice:
    """bf16, fp16 or fp32, with the reason."""
    precision = recipe.train.precision if isinstance(recipe, TrainRecipe) else "auto"
    if precision != "auto":
        return Choice(subject="precision", value=precision, because="the recipe says so")
    if machines.device == "cpu":
        return Choice(subject="precision", value="fp32", because="CPUs: exact, and 16-bit gains little there")
    without = without_bf16(machines)
    because = f"no bf16 on {', '.join(without)}" if without else "every card has bf16"
    return Choice(subject="precision", value="fp16" if without else "bf16", because=because)


def without_bf16(machines: Machines) -> list[str]:
    """The nodes with a card that has no bf16; none on CPUs."""
    return [node.name for node in machines.nodes if machines.device == "cuda" and not _has_bf16(node, machines)]


def _has_bf16(node: Node, machines: Machines) -> bool:
    facts = machines.facts.get(node.name)
    names = [card.name for card in facts.gpu.cards] if facts else [card.model for card in node.gpus]
    cards = [hardware.lookup(name) for name in names]
    # A card that is not in the table is newer than the table.
    return all(card is None or card.has_bf16 for card in cards)
