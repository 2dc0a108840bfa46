"""What a recipe asks for beyond what there is: rows longer than the positions that the model was trained with, more rows at once than a step has,
adapters wider than the model. Pure.

A model with rotary positions computes beyond them, and badly. One with a table of positions cannot: `model.positions` of preflight judges that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.model import families, model_config
from homelab.shared.law import usable


def warnings(recipe: Recipe, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The lines for the plan. `local`: the model's config.json as this machine has it."""
    if not isinstance(recipe, TrainRecipe):
        return
    most = positions(recipe.model.name, facts, local)
    if most is not None and recipe.train.seq_len > most:
        yield "{}; {}".format(*beyond(recipe.train.seq_len, most))
    hidden = model_config.language_part(model_config.config_of(recipe.model.name, facts, local) or {}).get("hidden_size")
    if recipe.method.kind != "full" and isinstance(hidden, int) and recipe.method.rank > hidden:
        seen = f"rank = {recipe.method.rank} is more than the model's hidden_size of {hidden}: such an adapter has more weights than the layer that it changes"
        yield f"{seen}; edit the recipe: [method] rank = {hidden // 4} or less"
    asked, batch = recipe.parallel.micro_batch, recipe.train.global_batch
    if asked != "auto" and asked > batch:
        seen = f"micro_batch = {asked} is more rows than a step has (global_batch = {batch}): a rank takes its share at once"
        yield f"{seen}; edit the recipe: [parallel] micro_batch = {batch} or less"


def positions(name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> int | None:
    """The rotary positions that this model was trained with; None for another kind of positions, and where nobody knows."""
    config = model_config.config_of(name, facts, local)
    return of_config(config) if config is not None else None


def of_config(config: Mapping[str, Any]) -> int | None:
    """The same from a config.json: max_position_embeddings, or what its rope_scaling stretches the original ones to."""
    config = model_config.language_part(config)
    most = _number(config.get("max_position_embeddings"))
    is_rotary = any(str(key).startswith(("rope", "rotary")) for key in config) or families.from_config(dict(config)) is not None
    if not most or not is_rotary or config.get("alibi") is True:
        return None
    scaled = [table for key in ("rope_scaling", "rope_parameters") for table in _tables(config.get(key))]
    stretched = [_number(table.get("original_max_position_embeddings", most)) * _number(table.get("factor")) for table in scaled]
    return int(max((most, *stretched)))


def beyond(seq_len: int, most: int) -> tuple[str, str]:
    """(what is seen, the edit) of a recipe whose rows may be longer than these positions."""
    # transformers takes rope_scaling in place of rope_parameters, and their rope_theta would be lost with them.
    stretch = f'"rope_type": "yarn", "factor": {math.ceil(seq_len / most)}.0 in its rope_parameters (or in rope_scaling if it has none)'
    return (
        f"seq_len {seq_len} is beyond the {most} positions that the model was trained with (max_position_embeddings): it computes longer rows badly",
        f"edit the recipe: [train] seq_len = {most} or less; or name a folder of the model whose config.json stretches them: {stretch}",
    )


def _tables(value: object) -> Iterator[Mapping[str, Any]]:
    """The settings of rotary positions: one table, or one for each kind of layer."""
    if isinstance(value, Mapping):
        yield value
        yield from (part for part in value.values() if isinstance(part, Mapping))


def _number(value: object) -> float:
    """A number above 0 that a model may have, as it is; 0 for anything else."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9 else 0


def result_warnings(recipe: Recipe, facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """What `homelab gguf` will not make of the result: what a training leaves has to be of use."""
    config = model_config.on_nodes(facts)
    if not isinstance(recipe, TrainRecipe) or config is None:
        return ()
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        return ()
    targets = recipe.method.targets if recipe.method.kind != "full" and isinstance(recipe.method.targets, tuple) else ()
    reaches = any(target.rsplit(".", 1)[-1] in usable.ENDS for target in targets)
    refusal = usable.gguf_refusal(names[0][:80], is_untied=reaches and config.get("tie_word_embeddings") is not False)
    return () if refusal is None else (f"no GGUF file of the result: {refusal.reason}; {refusal.edit}",)
