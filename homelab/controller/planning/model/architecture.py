"""The shape of a model, and how many parameters it and its adapters have: exact counts from the config alone.

Covers decoders of the Llama kind: token embedding, blocks of attention and a gated MLP or experts, a head that may be the embedding
itself. The counts follow the model files of `transformers` (models/<type>/modeling_<type>.py) and `peft` (tuners/lora); the
tests compare them with both, module by module, on the meta device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from homelab.controller.planning.model import known_models, layers
from homelab.controller.planning.model.layers import Experts, Latent, Linear, count_of
from homelab.shared.protocol.quantisation import NF4, stored_of


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama kind. Sizes are in elements; `head_dim` is per attention head, `vocabulary` in rows.

    `norms_all_heads`: the norms of queries and keys are as wide as all heads together. `scales_logits`: no fused loss computes it. `experts`: of a
    mixture, in every layer but its dense ones; `intermediate` is then the width of these. `latent`: how it attends in place of `kv_heads` and `head_dim`.
    `sinks`: every head has a number that it attends to, and attention has no kernel but the plain one. `widened`: its files are quantised already and
    read as 16 bits, so no method quantises it again.
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
    experts: Experts | None = None
    latent: Latent | None = None
    sinks: bool = False
    widened: bool = False

    @property
    def query_width(self) -> int:
        """Features of all query heads of one token."""
        return self.heads * (self.latent.plain + self.latent.rotated if self.latent else self.head_dim)

    @property
    def key_width(self) -> int:
        """Features of all key heads of one token."""
        return self.query_width if self.latent else self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Features of all value heads of one token."""
        return self.heads * self.latent.value if self.latent else self.key_width

    @property
    def output_width(self) -> int:
        """Features that attention gives for one token."""
        return self.value_width if self.latent else self.query_width

    @property
    def dense_layers(self) -> int:
        """Layers with a plain MLP in a mixture of experts; 0 in any other model."""
        return self.experts.dense_layers if self.experts else 0

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.experts.dense_layers if self.experts else 0

    @functools.cached_property
    def attention(self) -> tuple[Linear, ...]:
        """The nn.Linear of one layer's attention, in the order of the forward pass."""
        if self.latent:
            return self.latent.block(self.hidden, self.heads, self.output_bias)
        output = Linear("o_proj", self.query_width, self.hidden, self.output_bias)
        if self.fused_projections:
            return (Linear("qkv_proj", self.hidden, self.query_width + 2 * self.key_width, self.qkv_bias), output)
        names = {"q_proj": self.query_width, "k_proj": self.key_width, "v_proj": self.key_width}
        return (*(Linear(name, self.hidden, width, self.qkv_bias) for name, width in names.items()), output)

    def mlp(self, width: int) -> tuple[Linear, ...]:
        """The nn.Linear of a gated MLP of this width; none where it is 0."""
        if not width:
            return ()
        inner = {"gate_up_proj": 2 * width} if self.fused_projections else {"gate_proj": width, "up_proj": width}
        return (
            *(Linear(name, self.hidden, outputs, self.mlp_bias) for name, outputs in inner.items()),
            Linear("down_proj", width, self.hidden, self.mlp_bias),
        )

    @functools.cached_property
    def block(self) -> tuple[Linear, ...]:
        """Every nn.Linear of one block, in the order of the forward pass; of a mixture, of a layer with experts."""
        return (*self.attention, *self.mlp(self.experts.shared_width if self.experts else self.intermediate))

    @functools.cached_property
    def linears(self) -> tuple[tuple[Linear, int], ...]:
        """Every nn.Linear of all blocks, with how often it is there."""
        if not self.dense_layers:
            return tuple((linear, self.layers) for linear in self.block)
        shared, dense = self.block[len(self.attention) :], self.mlp(self.intermediate)
        of_mlp = [(linear, self.expert_layers) for linear in shared] + [(linear, self.dense_layers) for linear in dense]
        return (*((linear, self.layers) for linear in self.attention), *of_mlp)

    @functools.cached_property
    def routed(self) -> tuple[tuple[Linear, int], ...]:
        """The two matrices of an expert, with how many experts the model has."""
        return (
            tuple((matrix, self.expert_layers * self.experts.count) for matrix in self.experts.matrices(self.hidden))
            if self.experts
            else ()
        )

    @functools.cached_property
    def linear_parameters(self) -> int:
        """Weights of all nn.Linear of the blocks, without biases and head."""
        return sum(count * linear.weights for linear, count in self.linears)

    @functools.cached_property
    def expert_parameters(self) -> int:
        """Weights of all routed experts."""
        return sum(count * matrix.weights for matrix, count in self.routed)

    @functools.cached_property
    def expert_tensors(self) -> tuple[tuple[int, int], ...]:
        """(elements, how many) of the tensors of experts and routers: a layer has one of each kind for all its experts."""
        if self.experts is None:
            return ()
        of_all = [(self.experts.count, matrix) for matrix in self.experts.matrices(self.hidden)] + [(1, self.experts.router(self.hidden))]
        sizes = [count * matrix.weights for count, matrix in of_all] + [count * matrix.outputs for count, matrix in of_all if matrix.bias]
        return tuple((size, self.expert_layers) for size in sizes)

    def quantised(self, how: str | None) -> tuple[tuple[Linear, int], ...]:
        """The matrices that a base held so has in few bits, with how many there are: every nn.Linear of the blocks, and in NF4 the experts."""
        if how is None:
            return ()
        return (*self.linears, *self.routed) if how == NF4 and self.experts and self.experts.packs else self.linears

    def quantised_parameters(self, how: str | None) -> int:
        """Their weights."""
        return sum(count * matrix.weights for matrix, count in self.quantised(how))

    @property
    def router_parameters(self) -> int:
        """Weights of all routers."""
        return self.expert_layers * self.experts.router(self.hidden).weights if self.experts else 0

    @property
    def block_parameters(self) -> int:
        """Weights of all matrices that the blocks hold, without the routers."""
        return self.linear_parameters + self.expert_parameters

    @functools.cached_property
    def active_parameters(self) -> int:
        """Weights of the blocks that one token is multiplied with: of a mixture, those of its experts and of the router."""
        taken = self.expert_parameters * self.experts.per_token // self.experts.count if self.experts else 0
        return self.linear_parameters + self.router_parameters + taken

    @functools.cached_property
    def bias_parameters(self) -> int:
        """Biases of the blocks."""
        own = [*self.linears, *self.routed]
        if self.experts:
            own.append((self.experts.router(self.hidden), self.expert_layers))
        return sum(count * linear.outputs for linear, count in own if linear.bias)

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
        """Scales of all RMS norms: of the blocks, of queries and keys where the model has them, and the last one; and the sinks of attention."""
        own = self.norms_per_layer * self.hidden + sum(self.query_key_norms) + (self.heads if self.sinks else 0)
        return self.layers * own + self.hidden

    @property
    def query_key_norms(self) -> tuple[int, ...]:
        """Elements of the norm of the queries and of that of the keys, of one layer; none where the model has none."""
        if self.latent:
            return tuple(size for size in (self.latent.query_rank, self.latent.key_rank) if size)
        if not self.query_key_norm:
            return ()
        return (self.query_width, self.key_width) if self.norms_all_heads else (self.head_dim, self.head_dim)

    @property
    def normed_width(self) -> int:
        """Features of one token that the norms of queries and keys read in a layer."""
        if self.latent:
            return sum(self.query_key_norms)
        return self.query_width + self.key_width if self.query_key_norm else 0

    def fuses(self, fused_loss: bool | str) -> bool:
        """Whether [train] fused_loss has an effect: "auto" has none for a model that scales its logits."""
        return bool(fused_loss) and not self.scales_logits

    @functools.cached_property
    def total(self) -> int:
        """All parameters; tied ones count once, as in `sum(p.numel() for p in model.parameters())`."""
        blocks = self.block_parameters + self.router_parameters + self.bias_parameters
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
    "qwen3_moe": {"query_key_norm": True},
    "mixtral": {},
    "olmoe": {"query_key_norm": True, "norms_all_heads": True},
    "gpt_oss": {"head_dim": 64, "attention_bias": True, "sinks": True},
    "deepseek_v2": {},
    "deepseek_v3": {},
}
KINDS = frozenset(_FAMILIES)
_READS_ATTENTION_BIAS = (
    "llama", "qwen3", "smollm3", "gemma", "gemma2", "gemma3_text", "olmo2", "olmo3", "granite", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3",
)  # fmt: skip
_READS_MLP_BIAS = ("llama", "smollm3", "granite", "deepseek_v2")


def from_config(config: dict[str, Any]) -> Architecture | None:
    """The shape that a model's config.json describes; None for a kind of model that this file does not know.

    Known are KINDS. An incomplete config is None too:
    no estimate is better than a wrong one.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        return None
    family = _FAMILIES[kind]
    shape = [count_of(config.get(key)) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")]
    shape += [count_of(config.get(key)) for key in ("intermediate_size", "vocab_size")]
    if not all(shape):
        return None
    hidden, depth, heads, intermediate, vocabulary = shape
    kv_heads = count_of(config.get("num_key_value_heads")) or heads
    head_dim = count_of(config.get("head_dim")) or family.get("head_dim") or hidden // heads
    attention_bias = kind in _READS_ATTENTION_BIAS and bool(config.get("attention_bias", family.get("attention_bias", False)))
    experts = layers.experts_of(config, depth) if kind in layers.PER_TOKEN else None
    latent = layers.latent_of(config) if layers.has_latent(kind) else None
    if (kind in layers.PER_TOKEN and experts is None) or (layers.has_latent(kind) and latent is None):
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
        norms_per_layer=family.get("norms_per_layer", 2),
        fused_projections=family.get("fused_projections", False),
        norms_all_heads=family.get("norms_all_heads", False),
        scales_logits=kind == "granite" and config.get("logits_scaling", 1) != 1,
        experts=experts,
        latent=latent,
        sinks=family.get("sinks", False),
        widened=(stored := stored_of(config)) is not None and stored.held is None,
    )


def known(name: str) -> Architecture | None:
    """The shape of a model by its hub id alone; None where the name is not known, or no formula counts it."""
    return from_config(known_models.config_of(name) or {})
