"""A base model whose files are quantised already: the recipe as it is held and trained then, or why it cannot be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.model import known_models
from homelab.shared.law import usable
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.quantisation import INT8, NF4


def config_of(name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The config.json of a model as a node has it, else as this machine has it, else what is known of its name."""
    found = on_nodes(facts)
    if found is not None:
        return dict(found)
    return dict(local) if local else known_models.config_of(name)


def on_nodes(facts: Mapping[str, Facts]) -> Mapping[str, Any] | None:
    """The config.json of the model as the first node that has it says."""
    return next((node.model.config for node in facts.values() if node.model and node.model.config), None)


def as_held(recipe: TrainRecipe, config: Mapping[str, Any] | None) -> TrainRecipe:
    """The recipe with the method that holds the base as its files do: adapters on 4 bits of bitsandbytes are planned as qlora. FP8 and MXFP4
    are read as 16 bits.

    Raises InputError where the method cannot train what is stored so.
    """
    stored, method = quantisation.stored_of(config), recipe.method
    if stored is None:
        return recipe
    refusal = usable.checkpoint_refusal(stored, method.kind, method.base, usable.original_of(recipe.model.name))
    if refusal is not None:
        where = "recipe, [method], and quantization_config in the model's config.json"
        raise InputError(f"{recipe.model.name}: {refusal.reason}", where=where, hint=f"edit the recipe: {refusal.edit}")
    held = {NF4: replace(method, kind="qlora", base="auto"), INT8: replace(method, kind="lora", base="8bit")}
    return recipe.model_copy(update={"method": held[stored.held]}) if stored.held in held else recipe
