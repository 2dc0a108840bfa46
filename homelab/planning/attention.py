"""Which attention a model computes with, as far as memory and time depend on it. What the worker does: `homelab.worker.grouped_queries`,
`homelab.worker.attention`."""

from __future__ import annotations

from collections.abc import Mapping

from homelab import hardware
from homelab.config.interpreter import uses_unsloth
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.worker import joined


def why_padded(recipe: Recipe, facts: Mapping[str, Facts]) -> str:
    """Why the rows of a pass are padded; empty where the worker will let them stand one after the other, as far as is known here."""
    if uses_unsloth(recipe):
        return "Unsloth has an attention of its own"
    for known in facts.values():
        config = known.model.config if known.model and known.model.config else {}
        text = config.get("text_config")
        reason = joined.unusual(text if isinstance(text, dict) else config)
        if reason is not None:
            return f"the model's rows cannot stand one after the other: {reason}"
    return ""


def repeats_keys(device: str, precision: str, card: str) -> bool:
    """Whether keys and values are repeated for grouped queries though no mask asks for it: only the flash kernel takes them as they
    are, and it wants 16 bits and an Ampere (8.0) or later. A card that nobody has heard of is newer than the table."""
    if device != "cuda":
        return False
    known = hardware.lookup(card)
    return precision == "fp32" or (known is not None and known.compute_capability < (8, 0))
