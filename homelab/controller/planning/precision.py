"""The precision of a training, where the recipe leaves it to the cluster, and what its cards make of it."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.base.units import listed
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts import card_generation
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import Machines, RankSlot
from homelab.controller.planning.types import Choice


def choose(recipe: Recipe, machines: Machines) -> Choice:
    """bf16, fp16 or fp32, with the reason."""
    precision = recipe.train.precision if isinstance(recipe, TrainRecipe) else "auto"
    if precision != "auto":
        return Choice(subject="precision", value=precision, because="the recipe says so")
    if machines.device == "cpu":
        return Choice(subject="precision", value="fp32", because="CPUs: exact, and 16-bit gains little there")
    without, unknown = without_bf16(machines), _named(_slots(machines, has_bf16=None))
    if without:
        reasons = [f"no bf16 on {', '.join(without)}"] if len(unknown) < len(without) else []
        reasons += [f"nobody knows whether {listed(unknown)} has bf16"] if unknown else []
        return Choice(subject="precision", value="fp16", because="; ".join(reasons))
    return Choice(subject="precision", value="bf16", because="every card has bf16")


def without_bf16(machines: Machines) -> list[str]:
    """The nodes with a card that has no bf16, or is not known to have it; none on CPUs."""
    slots = [*_slots(machines, has_bf16=False), *_slots(machines, has_bf16=None)]
    return list(dict.fromkeys(slot.node.name for slot in sorted(slots, key=lambda slot: slot.rank)))


def warnings_of(recipe: Recipe, machines: Machines) -> list[str]:
    """The cards of an unknown generation, and those that a recipe asks for what they do not have."""
    if not isinstance(recipe, TrainRecipe) or recipe.train.precision not in ("auto", "bf16"):
        return []
    warnings = []
    old, unknown = _slots(machines, has_bf16=False), _slots(machines, has_bf16=None)
    is_auto = recipe.train.precision == "auto"
    if unknown:
        ask = "preflight" if any(slot.facts for slot in unknown) else "plan RECIPE"
        so = "so precision is fp16, which every card has" if is_auto and not old else "and cards before Ampere (8.0) have none"
        key = 'precision = "bf16" trusts it' if is_auto else 'precision = "auto" leaves it to the cards'
        warnings.append(
            f"whether {listed(_named(unknown))} has bf16 is not known here, {so}: the node says it (homelab {ask}); [train] {key}"
        )
    if old and not is_auto:
        nodes = list(dict.fromkeys(slot.node.name for slot in old))
        others = [name for name in machines.names if name not in nodes]
        without = f", or leave {listed(nodes)} out: --nodes {','.join(others)}" if others else ""
        warnings.append(
            f'precision = "bf16", and {listed(_named(old))} has none (before Ampere): preflight refuses it. Edit [train] precision = "auto" (fp16 there){without}'
        )
    return warnings


def _slots(machines: Machines, *, has_bf16: bool | None) -> list[RankSlot]:
    slots = machines.slots if machines.device == "cuda" else ()
    return [slot for slot in slots if card_generation.has_bf16(slot.capability) is has_bf16]


def _named(slots: Iterable[RankSlot]) -> list[str]:
    return list(dict.fromkeys(f"{cards.short(slot.name)} of {slot.node.name}" for slot in slots))
