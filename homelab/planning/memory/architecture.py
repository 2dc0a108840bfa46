"""The shape of a model, and how many parameters it and its adapters have: exact counts from the config alone.

Covers decoders of the Llama kind: token embedding, blocks of attention and a gated MLP, a head that may be the embedding
itself. The counts follow the model files of `transformers` (models/<type>/modeling_<type>.py) and `peft` (tuners/lora); the
tests compare them with both, module by module, on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from homelab.errors import InputError, did_you_mean

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
    """A decoder of the Llama kind. Sizes are in elements; `head_dim` is per attention head, `vocabulary` in rows."""

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

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token."""
        return self.heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Features of all key (or all value) heads of one token."""
        return self.kv_heads * self.head_dim

    @property
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

    @property
    def linear_parameters(self) -> int:
        """Weights of all nn.Linear of the blocks, without biases and head: exactly what is quantised."""
        return self.layers * sum(linear.weights for linear in self.block)

    @property
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

    @property
    def norm_parameters(self) -> int:
        """Scales of all RMS norms: of the blocks, of queries and keys where the model has them, and the last one."""
        query_key = 2 * self.head_dim if self.query_key_norm else 0
        return self.layers * (self.norms_per_layer * self.hidden + query_key) + self.hidden

    @property
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
}
_READS_ATTENTION_BIAS = ("llama", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text")
_READS_MLP_BIAS = ("llama", "smollm3")


def from_config(config: dict[str, Any]) -> Architecture | None:
    """The shape that a model's config.json describes; None for a kind of model that this file does not know.

    Known are llama, mistral, qwen2, qwen3, smollm3, gemma, gemma2, gemma3_text and phi3. An incomplete config is None too:
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
    )


def _count(value: object) -> int:
    """A positive whole number as it is; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int, *, tied: bool = False
) -> Architecture:
    return Architecture(hidden, layers, heads, kv_heads, hidden // heads, intermediate, vocabulary, tied)


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> Architecture:
    return Architecture(hidden, layers, heads, 8, 128, intermediate, 151_936, tied, query_key_norm=True)


_LLAMA_2_7B = _llama(4096, 32, 32, 32, 11008, 32000)
_LLAMA_2_13B = _llama(5120, 40, 40, 40, 13824, 32000)
_LLAMA_3_8B = _llama(4096, 32, 32, 8, 14336, 128256)
_LLAMA_3_70B = _llama(8192, 80, 64, 8, 28672, 128256)
_QWEN_2_5_32B = Architecture(5120, 64, 40, 8, 128, 27648, 152_064, tied_embeddings=False, qkv_bias=True)
_LLAMA_3_1B = _llama(2048, 16, 32, 8, 8192, 128256, tied=True)
_LLAMA_3_3B = _llama(3072, 28, 24, 8, 8192, 128256, tied=True)
_TINYLLAMA = _llama(2048, 22, 32, 4, 5632, 32000)
_MISTRAL_7B = _llama(4096, 32, 32, 8, 14336, 32000)
_SMOLLM2 = {
    "135M": _llama(576, 30, 9, 3, 1536, 49152, tied=True),
    "360M": _llama(960, 32, 15, 5, 2560, 49152, tied=True),
    "1.7B": _llama(2048, 24, 32, 32, 8192, 49152, tied=True),
}

# From each model's config.json on the hub. Used until a node has the model and says what its config is.
_KNOWN: dict[str, Architecture] = {
    "meta-llama/Llama-2-7b-hf": _LLAMA_2_7B,
    "meta-llama/Llama-2-7b-chat-hf": _LLAMA_2_7B,
    "meta-llama/Llama-2-13b-hf": _LLAMA_2_13B,
    "meta-llama/Llama-2-13b-chat-hf": _LLAMA_2_13B,
    **dict.fromkeys(("meta-llama/Meta-Llama-3-70B", "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Llama-3.3-70B-Instruct"), _LLAMA_3_70B),
    **dict.fromkeys(("Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-32B-Instruct"), _QWEN_2_5_32B),
    "meta-llama/Meta-Llama-3-8B": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3-8B-Instruct": _LLAMA_3_8B,
    "meta-llama/Llama-3.1-8B": _LLAMA_3_8B,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3.1-8B": _LLAMA_3_8B,
    "meta-llama/Meta-Llama-3.1-8B-Instruct": _LLAMA_3_8B,
    "meta-llama/Llama-3.2-1B": _LLAMA_3_1B,
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_3_1B,
    "meta-llama/Llama-3.2-3B": _LLAMA_3_3B,
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3_3B,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _TINYLLAMA,
    "mistralai/Mistral-7B-v0.1": _MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.2": _MISTRAL_7B,
    "HuggingFaceTB/SmolLM3-3B": _llama(2048, 36, 16, 4, 11008, 128256, tied=True),
    "HuggingFaceTB/SmolLM3-3B-Base": _llama(2048, 36, 16, 4, 11008, 128256, tied=True),
    **{f"HuggingFaceTB/SmolLM2-{size}": shape for size, shape in _SMOLLM2.items()},
    **{f"HuggingFaceTB/SmolLM2-{size}-Instruct": shape for size, shape in _SMOLLM2.items()},
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
}
_KNOWN_LOWER = {name.lower(): shape for name, shape in _KNOWN.items()}


def known(name: str) -> Architecture | None:
    """The shape of a model that is planned for without a network, by its hub id (in any case); None for any other."""
    return _KNOWN_LOWER.get(name.lower())


def names() -> list[str]:
    """The hub ids of these models."""
    return list(_KNOWN)


def near(name: str) -> str:
    """" Did you mean ...?" with a name that is known here and much like this one; or nothing."""
    return did_you_mean(name, _KNOWN) if "/" in name else ""


def adapted_linears(
    architecture: Architecture, targets: Literal["all-linear"] | Sequence[str]
) -> tuple[tuple[Linear, int], ...]:
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
            f"the model has no layer named {quoted}.{near}" if unknown else "no layer is named to get an adapter",
            where="recipe, [method] targets",
            hint=f'targets = "all-linear", or a list of: {", ".join(layers)}',
        )
    return tuple(layers[name] for name in names)


def lora_parameters(
    architecture: Architecture, rank: int, targets: Literal["all-linear"] | Sequence[str] = ALL_LINEAR
) -> int:
    """Trainable parameters of LoRA: the sum of rank x (inputs + outputs) over all adapted layers (Hu et al. 2021).

    Raises InputError for a target that the model lacks.
    """
    return sum(
        count * rank * (linear.inputs + linear.outputs) for linear, count in adapted_linears(architecture, targets)
    )
