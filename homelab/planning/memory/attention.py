"""Which attention a model computes with, as far as memory and time depend on it. What the worker does: `homelab.worker.model.grouped_queries`,
`homelab.worker.model.packed_attention`."""

from __future__ import annotations

from collections.abc import Mapping

from homelab import hardware
from homelab.config.interpreter import uses_unsloth
from homelab.config.recipe import Recipe
from homelab.facts.node import Facts
from homelab.law import padding


def why_padded(recipe: Recipe, facts: Mapping[str, Facts]) -> str:
    """Why the rows of a pass are padded; empty where the worker will let them stand one after the other, as far as is known here."""
    if uses_unsloth(recipe):
        return "Unsloth has an attention of its own"
    for node_facts in facts.values():
        config = node_facts.model.config if node_facts.model and node_facts.model.config else {}
        text = config.get("text_config")
        reason = padding.unusual(text if isinstance(text, dict) else config)
        if reason is not None:
            return f"the model's rows cannot stand one after the other: {reason}"
    return ""


def repeats_keys(device: str, precision: str, card: str) -> bool:
    """Whether keys and values are repeated for grouped queries though no mask asks for it: only the flash kernel takes them as they
    are, and it wants 16 bits and an Ampere (8.0) or later. A card that is not in the table is newer than the table."""
    if device != "cuda":
        return False
    sheet = hardware.lookup(card)
    return precision == "fp32" or (sheet is not None and sheet.compute_capability < (8, 0))
