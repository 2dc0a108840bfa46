"""What cards without bf16 cost the others: with them precision is fp16. Pure.

Where the recipe leaves the precision open, the plan without them is made, too. It is taken where it is the faster one and the recipe does not name ddp;
where the old cards add little, that is said. A machine that has newer cards beside an old one is left as it is, and the edit is said: a recovery
reads the cards of cluster.toml, and would find the old one there again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.units import listed
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts import card_generation
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import Machines, RankSlot
from homelab.controller.planning.types import Choice, Plan

_WORTH_ITS_PRECISION = 0.15  # what old cards add of tokens per second, below which a person may want bf16 instead


def without(inputs: PlanInputs, machines: Machines, with_them: Plan | HomelabError, make: Callable[[PlanInputs], Plan]) -> Plan | None:
    """The plan in place of `with_them` (or of why there is none): without the old cards, or with a word on what they cost; None where there is nothing to say.

    Raises InputError with that edit where there is no plan with them, and one without.
    """
    old = [slot for slot in machines.slots if machines.device == "cuda" and not card_generation.has_bf16(slot.capability)]
    kept = tuple(name for name in machines.names if any(slot.node.name == name and slot not in old for slot in machines.slots))
    if not old or not kept or not _is_open(inputs.recipe):
        return None
    may_leave = inputs.recipe.parallel.strategy != "ddp"
    if isinstance(with_them, HomelabError) and not may_leave:
        return None
    try:
        plan = make(_narrowed(inputs, kept, old))
    except HomelabError:
        return None
    because = _because(old, plan, with_them)
    edits = [
        f"edit gpus of {name} in cluster.toml: without the {listed(names)}"
        for name in kept
        if (names := [cards.short(s.name) for s in old if s.node.name == name])
    ]
    gone = [name for name in machines.names if name not in kept]
    if isinstance(with_them, Plan) and not (may_leave and _is_better(plan, with_them)):
        return _advised(with_them, plan, gone) if not edits else None
    if edits and isinstance(with_them, HomelabError):
        raise InputError(with_them.message, where=with_them.where, hint=f"{because}: {'; '.join(edits)}")
    if edits and isinstance(with_them, Plan):
        return with_them.model_copy(update={"warnings": (*with_them.warnings, f"{because}: {'; '.join(edits)}")})
    because += f'. To use {"it" if len(old) == 1 else "them"} anyway: [parallel] strategy = "ddp"'
    choices = [Choice(subject=f"node {name}", value="left out", because=because) for name in gone]
    return plan.model_copy(
        update={
            "left_out": (*plan.left_out, *gone),
            "choices": (*choices, *plan.choices),
            "warnings": (*plan.warnings, f"left out: {because}"),
        }
    )


def _is_open(recipe: Recipe) -> bool:
    """Whether the recipe leaves open the precision and which machines take part."""
    return isinstance(recipe, TrainRecipe) and recipe.train.precision == "auto" and not isinstance(recipe.parallel.shares, dict)


def _narrowed(inputs: PlanInputs, kept: tuple[str, ...], old: list[RankSlot]) -> PlanInputs:
    """The same with these nodes alone, and of their cards without the old ones."""
    gone = {(slot.node.name, slot.local_rank) for slot in old}
    nodes, facts = [], dict(inputs.facts)
    for node in inputs.cluster.only(kept).nodes:
        gpus = tuple(gpu for place, gpu in enumerate(node.gpus) if (node.name, place) not in gone)
        if node.name in facts:
            of_node, gpus = facts[node.name], ()  # no choice by cluster.toml: it is made here
            known = tuple(card for place, card in enumerate(of_node.gpu.cards) if (node.name, place) not in gone)
            facts[node.name] = of_node.model_copy(update={"gpu": of_node.gpu.model_copy(update={"cards": known, "left_out": ()})})
        nodes.append(node.model_copy(update={"gpus": gpus}) if any(slot.node.name == node.name for slot in old) else node)
    return replace(inputs, cluster=inputs.cluster.only(kept).model_copy(update={"nodes": tuple(nodes)}), facts=facts)


def _is_better(plan: Plan, with_them: Plan) -> bool:
    """Whether the plan without the old cards has room where the other one has none, or is faster."""
    if plan.fits is False:
        return False
    if with_them.fits is False:
        return True
    return plan.time is not None and with_them.time is not None and plan.time.tokens_per_s > with_them.time.tokens_per_s


def _advised(with_them: Plan, plan: Plan, nodes: list[str]) -> Plan | None:
    """The plan with these nodes and a line that they add little; None where they add enough, or nobody knows."""
    if with_them.fits is False or plan.fits is False or not with_them.time or not plan.time:
        return None
    gain = with_them.time.tokens_per_s / plan.time.tokens_per_s - 1
    if gain >= _WORTH_ITS_PRECISION:
        return None
    add, pronoun = ("adds", "it") if len(nodes) == 1 else ("add", "them")
    line = (
        f"{listed(nodes)} {add} {gain:.0%} tokens per second, and without {pronoun} every card has bf16: homelab plan RECIPE"
        f" {' '.join(f'--what-if=-{name}' for name in nodes)} compares"
    )
    return with_them.model_copy(update={"warnings": (*with_them.warnings, line)})


def _because(old: list[RankSlot], plan: Plan, with_them: Plan | HomelabError) -> str:
    """What it would be with the old cards, and what it is without them."""
    names = list(dict.fromkeys(f"{cards.short(slot.name)} of {slot.node.name}" for slot in old))
    stays, pronoun = ("stays", "it") if len(old) == 1 else ("stay", "them")
    there = (
        f"there is no plan ({with_them.message})"
        if isinstance(with_them, HomelabError)
        else f"{with_them.strategy} does {_rate(with_them)}"
    )
    return (
        f"the {listed(names)} {stays} out: with {pronoun} precision is fp16, and {there}; without {pronoun}, "
        f"{plan.strategy} in {plan.precision} does {_rate(plan)}"
    )


def _rate(plan: Plan) -> str:
    rate = f"{plan.time.tokens_per_s:.0f} tokens/s" if plan.time else "nobody knows how much"
    return f"{rate} but does not fit on every card" if plan.fits is False else rate
