"""What a training leaves has to be of use: what will not be made of the result is said. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.model import stored_base
from homelab.shared.law import usable


def warnings(recipe: Recipe, facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """What `homelab gguf` will not make of the result."""
    config = stored_base.on_nodes(facts)
    if not isinstance(recipe, TrainRecipe) or config is None:
        return ()
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return ()
    targets = recipe.method.targets if recipe.method.kind != "full" and isinstance(recipe.method.targets, tuple) else ()
    reaches = any(target.rsplit(".", 1)[-1] in usable.ENDS for target in targets)
    refusal = usable.gguf_refusal(names[0][:80], is_untied=reaches and config.get("tie_word_embeddings") is not False)
    return () if refusal is None else (f"no GGUF file of the result: {refusal.reason}; {refusal.edit}",)
