"""The shape of a model, and how many parameters it and its adapters have: exact counts from the config alone.

Covers decoders of the Llama kind: token embedding, blocks of attention and a gated MLP, a head that may be the embedding
itself. The counts follow the model files of `transformers` (models/<type>/modeling_<type>.py) and `peft` (tuners/lora); the
tests compare them with both, module by module, on the meta device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.planning.model import known_models

ALL_LINEAR: Literal["all-linear"] = "all-linear"


class Linear(NamedTuple):
    """One nn.Linear: the last part of its name, features in and out, and whether it has a bias."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """Elements of the weight matrix."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama kind. Sizes are in elements; `head_dim` is per attention head, `vocabulary` in rows.

    `norms_all_heads`: the norms of queries and keys are as wide as all heads together. `scales_logits`: no fused loss computes it.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    norms_per_layer: int = 2
    fused_projections: bool = False
    norms_all_heads: bool = False
    scales_logits: bool = False

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features of all key (or all value) heads of one token."""
        return self.kv_heads * self.head_dim

    @functools.cached_property
    def block(self) -> tuple[Linear, ...]:
        """Every nn.Linear of one block, in the order of the forward pass."""
        output = Linear("o_proj", self.query_width, self.hidden, self.output_bias)
        down = Linear("down_proj", self.intermediate, self.hidden, self.mlp_bias)
        if self.fused_projections:
            qkv = Linear("qkv_proj", self.hidden, self.query_width + 2 * self.key_width, self.qkv_bias)
            return (qkv, output, Linear("gate_up_proj", self.hidden, 2 * self.intermediate, self.mlp_bias), down)
        return (
            Linear("q_proj", self.hidden, self.query_width, self.qkv_bias),
            Linear("k_proj", self.hidden, self.key_width, self.qkv_bias),
            Linear("v_proj", self.hidden, self.key_width, self.qkv_bias),
            output,
            Linear("gate_proj", self.hidden, self.intermediate, self.mlp_bias),
            Linear("up_proj", self.hidden, self.intermediate, self.mlp_bias),
            down,
        )

    @functools.cached_property
    def linear_parameters(self) -> int:
        """Weights of all nn.Linear of the blocks, without biases and head: exactly what is quantised."""
        return self.layers * sum(linear.weights for linear in self.block)

    @functools.cached_property
    def bias_parameters(self) -> int:
        """Biases of the blocks."""
        return self.layers * sum(linear.outputs for linear in self.block if linear.bias)

    @property
    def embedding_parameters(self) -> int:
        """The table of token embeddings."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """`lm_head`, where it is a matrix of its own; 0 where it is the embedding table."""
        return 0 if self.tied_embeddings else self.vocabulary * self.hidden

    @functools.cached_property
    def norm_parameters(self) -> int:
        """Scales of all RMS norms: of the blocks, of queries and keys where the model has them, and the last one."""
        return self.layers * (self.norms_per_layer * self.hidden + sum(self.query_key_norms)) + self.hidden

    @property
    def query_key_norms(self) -> tuple[int, ...]:
        """Elements of the norm of the queries and of that of the keys, of one layer; none where the model has none."""
        if not self.query_key_norm:
            return ()
        return (self.query_width, self.key_width) if self.norms_all_heads else (self.head_dim, self.head_dim)

    def fuses(self, fused_loss: bool | str) -> bool:
        """Whether [train] fused_loss has an effect: "auto" has none for a model that scales its logits."""
        return bool(fused_loss) and not self.scales_logits

    @functools.cached_property
    def total(self) -> int:
        """All parameters; tied ones count once, as in `sum(p.numel() for p in model.parameters())`."""
        blocks = self.linear_parameters + self.bias_parameters
        return blocks + self.embedding_parameters + self.head_parameters + self.norm_parameters


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
    "gemma3_text": {"tied_embeddings": True, "head_dim": 256, "norms_per_layer": 4, "query_key_norm": True},
    "phi3": {"fused_projections": True},
    "olmo2": {"query_key_norm": True, "norms_all_heads": True},
    "olmo3": {"query_key_norm": True, "norms_all_heads": True},
    "granite": {},
}
KINDS = frozenset(_FAMILIES)
_READS_ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite")
_READS_MLP_BIAS = ("llama", "smollm3", "granite")
# Far beyond any model, and small enough that no estimate overflows.
_MOST = 10**8


def from_config(config: dict[str, Any]) -> Architecture | None:
    """The shape that a model's config.json describes; None for a kind of model that this file does not know.

    Known are KINDS. An incomplete config is None too:
    no estimate is better than a wrong one.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        return None
    family = _FAMILIES[kind]
    shape = [_count(config.get(key)) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")]
    shape += [_count(config.get(key)) for key in ("intermediate_size", "vocab_size")]
    if not all(shape):
        return None
    hidden, layers, heads, intermediate, vocabulary = shape
    kv_heads = _count(config.get("num_key_value_heads")) or heads
    head_dim = _count(config.get("head_dim")) or family.get("head_dim") or hidden // heads
    attention_bias = kind in _READS_ATTENTION_BIAS and bool(config.get("attention_bias", False))
    tied = config.get("tie_word_embeddings")
    return Architecture(
        hidden=hidden,
        layers=layers,
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
        norms_per_layer=family.get("norms_per_layer", 2),
        fused_projections=family.get("fused_projections", False),
        norms_all_heads=family.get("norms_all_heads", False),
        scales_logits=kind == "granite" and config.get("logits_scaling", 1) != 1,
    )


def known(name: str) -> Architecture | None:
    """The shape of a model by its hub id alone; None where the name is not known, or no formula counts it."""
    return from_config(known_models.config_of(name) or {})


def _count(value: object) -> int:
    """A positive whole number that a model may have, as it is; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST else 0


def adapted_linears(architecture: Architecture, targets: Literal["all-linear"] | Sequence[str]) -> tuple[tuple[Linear, int], ...]:
    """The layers that get an adapter, each with how often it occurs in the model.

    "all-linear" is every nn.Linear but the head (peft, `_maybe_include_all_linear_layers`). A target may be written with its
    parents ("self_attn.q_proj"); "lm_head" and "embed_tokens" can be named. Raises InputError for a name the model lacks.
    """
    layers = {linear.name: (linear, architecture.layers) for linear in architecture.block}
    if targets == ALL_LINEAR:
        return tuple(layers.values())
    layers["lm_head"] = (Linear("lm_head", architecture.hidden, architecture.vocabulary), 1)
    layers["embed_tokens"] = (Linear("embed_tokens", architecture.vocabulary, architecture.hidden), 1)
    names = dict.fromkeys(target.rsplit(".", 1)[-1] for target in targets)
    unknown = [name for name in names if name not in layers]
    if unknown or not names:
        quoted = ", ".join(f'"{name}"' for name in unknown)
        near = did_you_mean(unknown[0], layers) if unknown else ""
        raise InputError(
            f"the model has no layer named {quoted}.{near}" if unknown else "no layer is named for the adapters",
            where="recipe, [method] targets",
            hint=f'targets = "all-linear", or a list of: {", ".join(layers)}',
        )
    return tuple(layers[name] for name in names)


def lora_parameters(architecture: Architecture, rank: int, targets: Literal["all-linear"] | Sequence[str] = ALL_LINEAR) -> int:
    """Trainable parameters of LoRA: the sum of rank x (inputs + outputs) over all adapted layers (Hu et al. 2021).

    Raises InputError for a target that the model lacks.
    """
    return sum(count * rank * (linear.inputs + linear.outputs) for linear, count in adapted_linears(architecture, targets))
