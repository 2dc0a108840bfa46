"""Which attention a model computes with, as far as memory and time depend on it. What the worker does: `homelab.worker.model.grouped_queries`,
`homelab.worker.model.packed_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.controller.base import hardware
from homelab.controller.config.interpreter import uses_unsloth
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.card_generation import AMPERE, Capability
from homelab.controller.facts.node import Facts
from homelab.controller.planning.types import Plan, RankPlan
from homelab.shared.law import padding


def why_padded(recipe: Recipe, facts: Mapping[str, Facts]) -> str:
    """Why the rows of a pass are padded; empty where the worker will let them stand one after the other, as far as is known here."""
    if uses_unsloth(recipe):
        return "Unsloth has its own attention"
    for node_facts in facts.values():
        config = node_facts.model.config if node_facts.model and node_facts.model.config else {}
        text = config.get("text_config")
        reason = padding.unusual(text if isinstance(text, dict) else config)
        if reason is not None:
            return f"the model's rows cannot be joined: {reason}"
    return ""


def repeats_keys(device: str, precision: str, capability: Capability | None) -> bool:
    """Whether keys and values are repeated for grouped queries though no mask asks for it: only the flash kernel takes them as they
    are, and it wants 16 bits and an Ampere or later. A card of a generation that nobody knows counts as one that repeats them: that is more memory."""
    return device == "cuda" and (precision == "fp32" or capability is None or capability < AMPERE)


def repeats_keys_of(plan: Plan, rank: RankPlan) -> bool:
    """The same of a rank of a plan; where that tells no generation, by the name of its card."""
    return repeats_keys(plan.device, plan.precision, rank.capability or hardware.generation(rank.device_name))
