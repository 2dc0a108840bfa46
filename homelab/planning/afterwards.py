"""What a training leaves has to be of use: what will not be made of the result is said. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.config.recipe import Recipe, TrainRecipe
from homelab.facts.node import Facts
from homelab.law import usable


def config_of(facts: Mapping[str, Facts]) -> dict[str, Any] | None:
    """config.json of the base model, as the first node that has it says."""
    return next((node.model.config for node in facts.values() if node.model and node.model.config), None)


def warnings(recipe: Recipe, facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """What `homelab gguf` will not make of the result."""
    config = config_of(facts)
    if not isinstance(recipe, TrainRecipe) or config is None:
        return ()
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return ()
    targets = recipe.method.targets if recipe.method.kind != "full" and isinstance(recipe.method.targets, tuple) else ()
    reaches = any(target.rsplit(".", 1)[-1] in usable.ENDS for target in targets)
    refusal = usable.gguf_refusal(names[0][:80], is_untied=reaches and config.get("tie_word_embeddings") is not False)
    return () if refusal is None else (f"no GGUF file of the result: {refusal.reason}; {refusal.edit}",)
