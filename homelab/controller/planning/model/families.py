"""The shape that a model's config.json describes, by its model_type. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from homelab.controller.planning.model import known_models, layers, sight
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.layers import count_of
from homelab.shared.protocol.quantisation import stored_of

# Of a text_config, which leaves out what is transformers' default.
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_GEMMA4 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_144, "hidden_size_per_layer_input": 256}
# What model_type says beyond the config's keys, from transformers' modeling files: defaults for keys that a config.json may
# lack, and what no key tells.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"query_key_norm": True, "head_dim": 128},
    "smollm3": {"tied_embeddings": True},
    "gemma": {"tied_embeddings": True, "head_dim": 256},
    "gemma2": {"tied_embeddings": True, "head_dim": 256, "norms_per_layer": 4},
    "gemma3_text": {
        "tied_embeddings": True,
        "head_dim": 256,
        "norms_per_layer": 4,
        "query_key_norm": True,
        "windowed": True,
        "else": _GEMMA3,
    },
    "gemma4_text": {
        "tied_embeddings": True,
        "head_dim": 256,
        "norms_per_layer": 4,
        "query_key_norm": True,
        "value_norm": True,
        "windowed": True,
        "else": _GEMMA4,
    },
    "phi3": {"fused_projections": True},
    "olmo2": {"query_key_norm": True, "norms_all_heads": True},
    "olmo3": {"query_key_norm": True, "norms_all_heads": True},
    "granite": {},
    "qwen3_moe": {"query_key_norm": True},
    "mixtral": {},
    "olmoe": {"query_key_norm": True, "norms_all_heads": True},
    "gpt_oss": {"head_dim": 64, "attention_bias": True, "sinks": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "qwen3_next": {"query_key_norm": True, "head_dim": 256, "gated_output": True},
    "qwen3_5_text": {"query_key_norm": True, "head_dim": 256, "gated_output": True},
    "qwen3_5_moe_text": {"query_key_norm": True, "head_dim": 256, "gated_output": True, "intermediate_size": 0},
}
# With a part for images: what the language model is stands in text_config. transformers builds it alone for a causal language model, or (`sight.SEEING`) with that part.
_TEXT_OF = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text"}
KINDS = frozenset((*_FAMILIES, *_TEXT_OF))
_READS_ATTENTION_BIAS = (
    "llama", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text",
)  # fmt: skip
_READS_MLP_BIAS = ("llama", "smollm3", "granite", "deepseek_v2")


def from_config(config: dict[str, Any]) -> Architecture | None:
    """The shape that a model's config.json describes; None for a kind of model that this file does not know.

    Known are KINDS. An incomplete config is None too:
    no estimate is better than a wrong one.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _TEXT_OF:
        return _of_text(config) if isinstance(kind, str) and kind in _FAMILIES else None
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return None
    stored = {"quantization_config": config["quantization_config"]} if "quantization_config" in config else {}
    shape = _of_text({**text, "model_type": _TEXT_OF[kind], **stored})
    if shape is None or kind not in sight.SEEING:
        return shape
    outside = sight.weights_of(config, shape.hidden)
    return replace(shape, outside=outside) if outside is not None else None


def _of_text(config: dict[str, Any]) -> Architecture | None:
    """The same of the config of a language model, whose kind is one of _FAMILIES."""
    kind = config["model_type"]
    family = _FAMILIES[kind]
    config = {**family.get("else", {}), **config}
    shape = [count_of(config.get(key)) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")]
    shape += [count_of(config.get("vocab_size"))]
    intermediate = family.get("intermediate_size", count_of(config.get("intermediate_size")))
    if not all(shape) or not (intermediate or "intermediate_size" in family):
        return None
    hidden, depth, heads, vocabulary = shape
    kv_heads = count_of(config.get("num_key_value_heads")) or heads
    head_dim = count_of(config.get("head_dim")) or family.get("head_dim") or hidden // heads
    attention_bias = kind in _READS_ATTENTION_BIAS and bool(config.get("attention_bias", family.get("attention_bias", False)))
    is_gemma4 = kind == "gemma4_text"
    if is_gemma4 and any(config.get(key) for key in ("hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")):
        return None  # layers that need more than what the one before gives
    is_mixture = kind in layers.PER_TOKEN and (not is_gemma4 or bool(config.get("enable_moe_block")))
    experts = layers.experts_of(config, depth) if is_mixture else None
    wide = layers.wide_of(config, depth) if is_gemma4 else None
    latent = layers.latent_of(config) if layers.has_latent(kind) else None
    delta = layers.delta_of(config, depth) if layers.has_delta(kind) else None
    parts = ((is_mixture, experts), (layers.has_latent(kind), latent), (layers.has_delta(kind), delta), (is_gemma4, wide))
    if any(has_part and part is None for has_part, part in parts):
        return None
    tied = config.get("tie_word_embeddings")
    return Architecture(
        hidden=hidden,
        layers=depth,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied_embeddings=bool(family.get("tied_embeddings", False) if tied is None else tied),
        qkv_bias=attention_bias or family.get("qkv_bias", False),
        output_bias=attention_bias,
        mlp_bias=kind in _READS_MLP_BIAS and bool(config.get("mlp_bias", False)),
        query_key_norm=family.get("query_key_norm", False),
        norms_per_layer=family.get("norms_per_layer", 2) + (3 if is_gemma4 and experts else 0),
        fused_projections=family.get("fused_projections", False),
        norms_all_heads=family.get("norms_all_heads", False),
        scales_logits=kind == "granite" and config.get("logits_scaling", 1) != 1,
        experts=experts,
        latent=latent,
        sinks=family.get("sinks", False),
        widened=(stored := stored_of(config)) is not None and stored.held is None,
        delta=delta,
        gated_output=family.get("gated_output", False),
        wide=wide,
        value_norm=family.get("value_norm", False),
        windowed=family.get("windowed", False),
    )


def known(name: str) -> Architecture | None:
    """The shape of a model by its hub id alone; None where the name is not known, or no formula counts it."""
    return from_config(known_models.config_of(name) or {})
