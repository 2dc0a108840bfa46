"""The config.json of a base model: where it is taken from, the numbers and kinds that are refused before any formula counts it, and the recipe as a
base is held whose files are quantised already. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.model import families, known_models
from homelab.shared.law import model_kinds, usable
from homelab.shared.law.stage import has_experts
from homelab.shared.protocol import model_forms, quantisation
from homelab.shared.protocol.quantisation import INT8, NF4

_WHERE = "recipe, [model] name"
# The most that a model may have: ten to a hundred times as much as the largest.
_MOST = {
    "num_hidden_layers": 10_000, "num_attention_heads": 100_000, "num_key_value_heads": 100_000, "head_dim": 1_000_000, "hidden_size": 10_000_000,
    "intermediate_size": 100_000_000, "vocab_size": 100_000_000, "max_position_embeddings": 10**12,
}  # fmt: skip
_FROM_WHERE = "copy the model's folder again from its source: its config.json is damaged, or of another model"


def refuse_numbers(name: str, config: Mapping[str, Any]) -> None:
    """Raises InputError where config.json of the model `name` holds a number that no model has."""
    is_known = str(config.get("model_type")) in families.KINDS  # a node says anything in its place
    for part, key, value in _numbers(config):
        if not _may_be(value, _MOST[key], is_counted=key != "max_position_embeddings" and is_known):
            raise InputError(
                f"config.json of {name} says {part}{key} = {_shown(value)}, which no model has", where=_WHERE, hint=_FROM_WHERE
            )
    config = language_part(config)
    sizes = [config.get(key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")]
    hidden, heads, kv_heads = (size if isinstance(size, int) else 0 for size in sizes)
    if hidden and heads > hidden and not config.get("head_dim"):
        raise InputError(
            f"config.json of {name} contradicts itself: {heads} attention heads share a hidden_size of {hidden}",
            where=_WHERE,
            hint=_FROM_WHERE,
        )
    if heads and kv_heads > heads:
        raise InputError(
            f"config.json of {name} contradicts itself: {kv_heads} heads of keys for {heads} of queries", where=_WHERE, hint=_FROM_WHERE
        )


def refuse_kind(name: str, config: Mapping[str, Any] | None) -> None:
    """Raises InputError for a model that no node trains, as far as its name and its config.json tell."""
    if config is None and name.lower().endswith(("-gguf", ".gguf", "_gguf")):
        hint = Hint("edit the recipe: [model] name = {}; {} makes a GGUF of the result", usable.original_of(name), homelab("gguf RUN"))
        raise InputError(f"{name}, by its name, {model_forms.HELD[model_forms.GGUF][0]}", where=_WHERE, hint=hint)
    refused = model_kinds.refusal(config or {})
    if refused is not None:
        raise InputError(f"{name}: {refused.reason}", where=_WHERE, hint=refused.edit)


def why_no_formula(config: Mapping[str, Any]) -> str:
    """Why no formula counts the model of this config.json, after its name."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return "has no model_type, so homelab does not know its kind"
    if (shape := families.from_config(dict(config))) is not None and shape.outside:
        or_experts = ", nor adapters that a list puts on routed experts" if shape.experts else ""
        return (
            f"has a part for images ({kind[:40]}), which the formulas of the planner do not count where all weights are trained{or_experts}"
        )
    if shape is not None:
        return (
            "has adapters on routed experts or their router by the list in [method] targets, which the formulas of the planner do not count"
        )
    if has_experts(language_part(config)):
        return f"is a mixture of experts ({kind[:40]}), which the formulas of the planner do not know"
    if isinstance(config.get("vision_config"), Mapping) or isinstance(config.get("audio_config"), Mapping) or kind in _SEES:
        return f"has a part for images or sounds ({kind[:40]}), which the formulas of the planner do not know"
    if kind in _STATES:
        return f"keeps a state in place of attention ({kind[:40]}), which the formulas of the planner do not know"
    return f"is of a kind that the formulas of the planner do not know ({kind[:40]})"


# Causal language models of transformers in spite of it.
_SEES = frozenset(("gemma3n", "gemma4", "llama4", "mllama"))
_STATES = frozenset(
    (
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "mamba",
        "mamba2",
        "nemotron_h",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    )
)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(part, key, value) of the sizes that are said."""
    for part, table in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(table, Mapping):
            yield from ((part, key, table[key]) for key in _MOST if table.get(key) is not None)


def _may_be(value: object, most: int, *, is_counted: bool) -> bool:
    """Whether a size may be that. Of a kind that formulas count it is one whole number; of others no more is known than what is too much."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value > 0 if is_counted else True) and value <= most
    return not is_counted and not (isinstance(value, float) and value > most)


def _shown(value: object) -> str:
    if not isinstance(value, int) or isinstance(value, bool):
        return repr(value)[:60] if isinstance(value, (str, float, bool)) else f"a {type(value).__name__}"
    return str(value) if abs(value) < 10**30 else f"a number of {int(value.bit_length() * 0.30103) + 1} digits"


def own_dtype(facts: Mapping[str, Facts]) -> str | None:
    """What the model was made in, by its config.json: `dtype`, or `torch_dtype` before transformers 5. None where that is not known."""
    for node_facts in facts.values():
        config = node_facts.model.config if node_facts.model and node_facts.model.config else {}
        text = config.get("text_config")
        for one in (config, text if isinstance(text, dict) else {}):
            dtype = one.get("dtype") or one.get("torch_dtype")
            if isinstance(dtype, str):
                return dtype.removeprefix("torch.")
    return None


def kind_and_positions(name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None) -> tuple[str, int | None]:
    """The model_type ("": not known) and the most tokens that the model reads (None: not known)."""
    config = config_of(name, facts, local) or {}
    kind, positions = config.get("model_type"), language_part(config).get("max_position_embeddings")
    return kind if isinstance(kind, str) else "", positions if isinstance(positions, int) else None


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What config.json says of the language model: all of it, or of a model with other parts its text_config."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


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
    """The recipe with the method that holds the base as its files do: adapters on 4 bits of bitsandbytes are planned as qlora. FP8 is read as 16
    bits; of MXFP4, `Architecture.held` knows more.

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
