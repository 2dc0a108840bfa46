"""What a training leaves has to be of use: what cannot be trained with such files is refused, and what will not be made of the result is said. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.config.recipe import Recipe, TrainRecipe
from homelab.errors import InputError
from homelab.facts.node import Facts
from homelab.law import usable


def config_of(facts: Mapping[str, Facts]) -> dict[str, Any] | None:
    """config.json of the base model, as the first node that has it says."""
    return next((node.model.config for node in facts.values() if node.model and node.model.config), None)


def refuse(recipe: Recipe, facts: Mapping[str, Facts]) -> None:
    """Raises InputError where the weights of the base model are quantised in a way that does not go with the recipe's method."""
    config = config_of(facts)
    if not isinstance(recipe, TrainRecipe) or config is None:
        return
    refusal = usable.checkpoint_refusal(config, recipe.method.kind, recipe.method.base)
    if refusal is not None:
        raise InputError(f"{recipe.model.name}: {refusal.reason}", where="recipe, [method] kind, and quantization_config in the model's config.json", hint=refusal.edit)


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
