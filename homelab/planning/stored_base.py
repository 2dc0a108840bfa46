"""A base model whose files are quantised already: the recipe as it is held and trained then, or why it cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.config.recipe import TrainRecipe
from homelab.errors import InputError
from homelab.facts.node import Facts
from homelab.protocol import quantisation
from homelab.protocol.quantisation import INT8, NF4


def config_of(facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The model's config.json as a node has it, else as this machine has it."""
    found = next((node.model.config for node in facts.values() if node.model and node.model.config), None)
    return found if found is not None else dict(local) if local else None


def as_held(recipe: TrainRecipe, config: Mapping[str, Any] | None) -> TrainRecipe:
    """The recipe with the method that holds the base as its files do: adapters on 4 bits of bitsandbytes are planned as qlora. FP8 and MXFP4
    are read as 16 bits.

    Raises InputError for weights that homelab does not train on, and for a method that would quantise them once more.
    """
    stored = quantisation.stored_of(config)
    if stored is None:
        return recipe
    method, seen = recipe.method, f"the weights of the model are quantised already ({stored.words})"
    where, original = "config.json of the model, quantization_config", "edit the recipe: [model] name = the 16-bit model that it was made from"
    if not stored.is_known:
        raise InputError(f"{seen}, and homelab does not train on them", where=where, hint=f'{original}; kind = "qlora" holds that one in 4 bits, too')
    if stored.held is not None and method.kind == "full":
        raise InputError(f'{seen}: kind = "full" trains the weights themselves', where="recipe, [method] kind", hint=f'kind = "lora" trains adapters on them; or {original}')
    if method.quantisation not in (None, stored.held):
        raise InputError(f"{seen}, and the recipe would quantise them once more", where="recipe, [method]", hint=f'kind = "lora" holds them as they are; or {original}')
    held = {NF4: {"kind": "qlora", "base": "auto"}, INT8: {"kind": "lora", "base": "8bit"}}
    return recipe.model_copy(update={"method": method.model_copy(update=held[stored.held])}) if stored.held in held else recipe
