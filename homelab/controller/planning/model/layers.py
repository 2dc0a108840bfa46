"""Parts of a decoder's layer: a linear layer, the routed experts of a mixture, attention through latent vectors, and the gated delta rule. Pure.

Sources: transformers (models/qwen3_moe, mixtral, olmoe, gpt_oss, deepseek_v2, deepseek_v3, qwen3_next, qwen3_5, qwen3_5_moe: the modeling and
configuration files). The experts of a layer are two tensors of three dimensions there, and its router is a matrix: none of them is an nn.Linear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from homelab.shared.law.stage import EXPERT_COUNTS
from homelab.shared.protocol import quantisation

# Far beyond any model, and small enough that no estimate overflows.
_MOST = 10**8


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
class Experts:
    """The routed experts of each layer that has some: `count` of them, of which a token takes `per_token`, each as wide as `width` features.

    `shared_width`: of the expert that every token takes, 0 where there is none. `dense_layers`: how many layers have a plain MLP in place of
    experts. `has_biases`: experts and router have them. `packs`: whether a base in 4 bits has its experts in 4 bits, too. `is_stored`: its files have them in
    MXFP4, and they stay so where adapters are trained. `weighs_in_fp32`: the
    outputs of a token's experts are added with weights in fp32. `clamps`: gate and up are limited before they are multiplied.
    `gates_shared`: a matrix of one row weighs the shared expert; it counts as a row of the router.
    """

    count: int
    per_token: int
    width: int
    shared_width: int = 0
    dense_layers: int = 0
    has_biases: bool = False
    packs: bool = True
    is_stored: bool = False
    weighs_in_fp32: bool = False
    clamps: bool = False
    gates_shared: bool = False

    def matrices(self, hidden: int) -> tuple[Linear, Linear]:
        """The two matrices of one expert."""
        return (Linear("gate_up_proj", hidden, 2 * self.width, self.has_biases), Linear("down_proj", self.width, hidden, self.has_biases))

    def router(self, hidden: int) -> Linear:
        """The matrix that chooses the experts of a token."""
        return Linear("router", hidden, self.count + self.gates_shared, self.has_biases)


@dataclass(frozen=True)
class Latent:
    """Attention of DeepSeek: queries (`query_rank`; 0: directly) and keys with values (`key_rank`) are made from short vectors. A head of queries or keys has
    `plain` features and `rotated` ones, a head of values `value` features."""

    query_rank: int
    key_rank: int
    plain: int
    rotated: int
    value: int

    def block(self, hidden: int, heads: int, bias: bool) -> tuple[Linear, ...]:
        """The linear layers of one layer's attention."""
        query, through = heads * (self.plain + self.rotated), self.query_rank
        queries = (
            (Linear("q_a_proj", hidden, through, bias), Linear("q_b_proj", through, query))
            if through
            else (Linear("q_proj", hidden, query),)
        )
        return (
            *queries,
            Linear("kv_a_proj_with_mqa", hidden, self.key_rank + self.rotated, bias),
            Linear("kv_b_proj", self.key_rank, heads * (self.plain + self.value)),
            Linear("o_proj", heads * self.value, hidden, bias),
        )


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (Yang, Kautz, Hatamizadeh 2024) in place of attention, in `layers` of a model's layers: heads of keys and of values, the features of
    each, and the tokens that the convolution before it sees. `joins`: its projections are two matrices, not four."""

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    joins: bool = False

    @property
    def keys(self) -> int:
        """Features of all keys of a token, and of all queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Features of all values of a token."""
        return self.value_heads * self.value_dim

    def block(self, hidden: int) -> tuple[Linear, ...]:
        """The linear layers of one layer, in the order of the forward pass."""
        mixed, heads = 2 * self.keys + self.values, self.value_heads
        sizes = (
            {"in_proj_qkvz": mixed + self.values, "in_proj_ba": 2 * heads}
            if self.joins
            else {"in_proj_qkv": mixed, "in_proj_z": self.values, "in_proj_b": heads, "in_proj_a": heads}
        )
        return (*(Linear(name, hidden, outputs) for name, outputs in sizes.items()), Linear("out_proj", self.values, hidden))

    @property
    def others(self) -> tuple[int, ...]:
        """Elements of what else one layer has: the convolution, the steps and decays of the heads, and the norm of the values."""
        return (self.kernel * (2 * self.keys + self.values), self.value_heads, self.value_heads, self.value_dim)


@dataclass(frozen=True)
class WideAttention:
    """Attention of Gemma 4 over all tokens, in the layers `places`, where the others see a window: heads of other sizes. `joins`: keys are the values, too, before
    their norms."""

    places: tuple[int, ...]
    head_dim: int
    kv_heads: int
    joins: bool

    def most_of(self, count: int, layers: int) -> int:
        """How many of them are among `count` layers in a row, at most, of `layers`."""
        return max(sum(begin <= place < begin + count for place in self.places) for begin in range(layers - count + 1))


# model_type of a mixture -> what a token takes where config.json does not say it.
PER_TOKEN = {
    "qwen3_moe": 8,
    "mixtral": 2,
    "olmoe": 8,
    "gpt_oss": 4,
    "deepseek_v2": 0,
    "deepseek_v3": 8,
    "qwen3_next": 10,
    "qwen3_5_moe_text": 8,
    "gemma4_text": 0,
}
_LATENT = ("deepseek_v2", "deepseek_v3")
_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def experts_of(config: Mapping[str, Any], layers: int) -> Experts | None:
    """The experts that the config.json of a mixture describes; None where it does not say all of it, or where no layer has experts."""
    kind = str(config.get("model_type"))
    of_their_own = kind in ("qwen3_moe", "gemma4_text", *_LATENT, *_DELTA)
    width = count_of(config.get("moe_intermediate_size" if of_their_own else "intermediate_size"))
    count = next((found for key in EXPERT_COUNTS if (found := count_of(config.get(key)))), 0)
    per_token = count_of(config.get("top_k_experts" if kind == "gemma4_text" else "num_experts_per_tok")) or PER_TOKEN[kind]
    dense = _dense_layers(config, layers)
    shared = config.get("n_shared_experts", 0) if kind in _LATENT else 0
    if not (width and 0 < per_token <= count) or dense is None or dense >= layers or not isinstance(shared, int):
        return None
    is_gpt_oss, has_one_shared = kind == "gpt_oss", kind in _DELTA
    files = quantisation.stored_of(dict(config))
    is_stored = is_gpt_oss and files is not None and files.method == quantisation.MXFP4
    shared_width = count_of(config.get("shared_expert_intermediate_size", 512)) if has_one_shared else count_of(shared) * width
    if kind == "gemma4_text":  # its MLP is there beside the experts
        shared_width = count_of(config.get("intermediate_size"))
    if (has_one_shared or kind == "gemma4_text") and not shared_width:
        return None
    return Experts(
        count, per_token, width, shared_width, dense, has_biases=is_gpt_oss, packs=not is_gpt_oss, is_stored=is_stored,
        weighs_in_fp32=kind in ("mixtral", "deepseek_v2"), clamps=is_gpt_oss, gates_shared=has_one_shared,
    )  # fmt: skip


def latent_of(config: Mapping[str, Any]) -> Latent | None:
    """The latent attention that a config.json describes; None where it is incomplete."""
    sizes = [count_of(config.get(key)) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    query = config.get("q_lora_rank", 0)
    if not all(sizes) or not (query is None or count_of(query)):
        return None
    return Latent(count_of(query), *sizes)


def has_latent(kind: str) -> bool:
    """Whether models of this type attend through latent vectors."""
    return kind in _LATENT


def delta_of(config: Mapping[str, Any], layers: int) -> DeltaRule | None:
    """The gated delta rule that a config.json describes; None where it is incomplete or no layer has it."""
    named, every = config.get("layer_types"), config.get("full_attention_interval", 4)
    if named is None:
        if not count_of(every):
            return None
        count = layers - layers // every
    elif isinstance(named, list) and len(named) == layers and all(one in ("linear_attention", "full_attention") for one in named):
        count = named.count("linear_attention")
    else:
        return None
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    sizes = [count_of(config.get(key, default)) for key, default in zip(keys, (16, 32, 128, 128, 4), strict=True)]
    key_heads, value_heads, key_dim, value_dim, kernel = sizes
    joins = config.get("model_type") == "qwen3_next"
    return DeltaRule(count, key_heads, value_heads, key_dim, value_dim, kernel, joins) if count and all(sizes) else None


def wide_of(config: Mapping[str, Any], layers: int) -> WideAttention | None:
    """Gemma 4's wide attention by a config.json; None where that is incomplete. The last layer always has it."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if (number + 1) % 6 == 0 else "sliding_attention" for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    places = tuple(number for number, kind in enumerate(kinds) if kind == "full_attention" or number == layers - 1)
    joins = config.get("attention_k_eq_v") is True
    kv_heads = (count_of(config.get("num_global_key_value_heads")) if joins else 0) or count_of(config.get("num_key_value_heads"))
    head_dim = count_of(config.get("global_head_dim", 512))
    by_layer = config.get("per_layer_config")  # as transformers 5 writes it
    if isinstance(by_layer, Mapping):
        own = by_layer.get(str(places[0]), by_layer.get(places[0]))
        if not isinstance(own, Mapping):
            return None
        kv_heads = count_of(own.get("num_key_value_heads", config.get("num_key_value_heads")))
        head_dim = count_of(own.get("head_dim", config.get("head_dim")))
    return WideAttention(places, head_dim, kv_heads, joins) if head_dim and kv_heads else None


def has_delta(kind: str) -> bool:
    """Whether some layers of models of this type have the gated delta rule in place of attention."""
    return kind in _DELTA


def _dense_layers(config: Mapping[str, Any], layers: int) -> int | None:
    """How many layers have a plain MLP; None where config.json does not say it in whole numbers."""
    kind = config.get("model_type")
    if kind in _LATENT:
        first = config.get("first_k_dense_replace", 0)
        return min(first, layers) if isinstance(first, int) and first >= 0 else None
    if kind not in ("qwen3_moe", "qwen3_next"):
        return 0
    named, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    if not isinstance(named, list) or not all(isinstance(one, int) for one in named) or not count_of(step) or layers > 10_000:
        return None
    return sum(1 for number in range(layers) if number in named or (number + 1) % step != 0)


def count_of(value: object) -> int:
    """A positive whole number that a model may have, as it is; 0 for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MOST else 0
