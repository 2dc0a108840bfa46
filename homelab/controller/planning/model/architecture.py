"""The shape of a model, and how many parameters it and its adapters have: exact counts.

Covers decoders of the Llama kind: token embedding, blocks of attention (or what stands in its place) and a gated MLP or experts, a head that may be the
embedding itself. The counts follow the model files of `transformers` (models/<type>/modeling_<type>.py) and `peft` (tuners/lora); the
tests compare them with both, module by module, on the meta device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from homelab.controller.planning.model.layers import DeltaRule, Experts, Latent, Linear, WideAttention
from homelab.shared.protocol.quantisation import MXFP4, NF4
from homelab.shared.recipe import Method


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Llama kind. Sizes are in elements; `head_dim` is per attention head, `vocabulary` in rows.

    `norms_all_heads`: the norms of queries and keys are as wide as all heads together. `scales_logits`: no fused loss computes it. `experts`: of a
    mixture, in every layer but its dense ones; `intermediate` is then the width of these. `latent`: how it attends in place of `kv_heads` and `head_dim`.
    `sinks`: every head has a number that it attends to, and attention has no kernel but the plain one. `widened`: its files are quantised already and
    stand for 16 bits, so no method quantises it again. `delta`: what some layers have in place of attention. `gated_output`: what attention gives is
    multiplied by a gate as wide, which q_proj makes, too; norms then compute in fp32 to their end. `outside`: the weights of
    parts for images, which a stage does not load. `wide`: attention with heads of another size in some layers. `joins_values`: keys are the values, too.
    `value_norm`: values have a norm, which has no weights.
    `windowed`: some layers see a window of tokens, which needs a mask whatever the rows are.
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
    delta: DeltaRule | None = None
    gated_output: bool = False
    outside: int = 0
    wide: WideAttention | None = None
    joins_values: bool = False
    value_norm: bool = False
    windowed: bool = False

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
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_layers(self) -> int:
        """Layers that attend, and not widely."""
        return self.layers - (self.delta.layers if self.delta else 0) - (len(self.wide.places) if self.wide else 0)

    @property
    def all_wide(self) -> Architecture:
        """The model with wide attention in every layer."""
        wide = self.wide
        assert wide is not None
        return replace(self, head_dim=wide.head_dim, kv_heads=wide.kv_heads, joins_values=wide.joins, wide=None)

    @functools.cached_property
    def attention(self) -> tuple[Linear, ...]:
        """The nn.Linear of one layer's attention, in the order of the forward pass."""
        if self.latent:
            return self.latent.block(self.hidden, self.heads, self.output_bias)
        output = Linear("o_proj", self.query_width, self.hidden, self.output_bias)
        if self.fused_projections:
            return (Linear("qkv_proj", self.hidden, self.query_width + 2 * self.key_width, self.qkv_bias), output)
        names = {"q_proj": (2 if self.gated_output else 1) * self.query_width, "k_proj": self.key_width}
        if not self.joins_values:
            names["v_proj"] = self.key_width
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
        """Every nn.Linear of all blocks, with how often it is there; 0 for those of attention in a model that is counted without any."""
        if not self.dense_layers and not self.delta and not self.wide:
            return tuple((linear, self.layers) for linear in self.block)
        shared = self.block[len(self.attention) :]
        of_mlp = [(linear, self.expert_layers if self.experts else self.layers) for linear in shared]
        of_mlp += [(linear, self.dense_layers) for linear in self.mlp(self.intermediate)] if self.dense_layers else []
        others = [(linear, self.delta.layers) for linear in self.delta.block(self.hidden)] if self.delta else []
        if self.wide is not None:
            others += [(linear, len(self.wide.places)) for linear in self.all_wide.attention]
        return (*((linear, self.attention_layers) for linear in self.attention), *others, *of_mlp)

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

    def held(self, method: Method) -> str | None:
        """NF4, INT8, MXFP4, or None: how the base has its matrices in few bits. Unsloth reads MXFP4 by itself: counted as 16 bits."""
        stays = self.experts is not None and self.experts.is_stored and method.kind != "full" and method.backend != "unsloth"
        return MXFP4 if stays else method.quantisation

    def quantised(self, how: str | None) -> tuple[tuple[Linear, int], ...]:
        """The matrices that a base held so has in few bits, with how many there are: every nn.Linear of the blocks, and in NF4 the experts; in MXFP4
        the experts alone."""
        if how is None:
            return ()
        if how == MXFP4:
            return self.routed
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
        """Scales of all RMS norms, and the other tensors that are no matrices."""
        return self.layers * self.norms_per_layer * self.hidden + sum(size * count for size, count in self.small_tensors) + self.hidden

    @property
    def small_tensors(self) -> tuple[tuple[int, int], ...]:
        """(elements, how many) of the norms of queries and keys, the sinks of attention, and what a delta rule has beside matrices."""
        of_attention = (*self.query_key_norms, *((self.heads,) if self.sinks else ()))
        tensors = [(size, self.attention_layers) for size in of_attention]
        if self.delta is not None:
            tensors += [(size, self.delta.layers) for size in self.delta.others]
        if self.wide is not None:
            tensors += [(size, len(self.wide.places)) for size in self.all_wide.query_key_norms]
        if self.experts is not None and self.value_norm:  # the router of Gemma 4 scales its input and its experts
            tensors += [(size, self.layers) for size in (self.hidden, self.experts.count)]
        return tuple(tensors)

    def of_layers(self, count: int) -> Architecture:
        """The same with so many layers, for a model of equal ones; of wide attention the most that so many layers in a row have."""
        delta = replace(self.delta, layers=count) if self.delta else None
        wide = replace(self.wide, places=tuple(range(self.wide.most_of(count, self.layers)))) if self.wide else None
        return replace(self, layers=count, delta=delta, wide=wide)

    @functools.cached_property
    def equal(self) -> Architecture | None:
        """The model with equal layers, which is no less than it needs: experts in each, where a layer without them is no wider than what a token takes of
        them, and the delta rule or wide attention in each, where its matrices are no smaller than attention's. None for any other model."""
        experts, delta = self.experts, self.delta
        if self.wide is not None:
            larger = sum(one.weights for one in self.all_wide.attention) >= sum(one.weights for one in self.attention)
            return self.all_wide if larger else None
        if delta is not None and sum(one.weights for one in delta.block(self.hidden)) < sum(one.weights for one in self.attention):
            return None
        if experts is not None and experts.dense_layers and self.intermediate > experts.per_token * experts.width + experts.shared_width:
            return None
        return replace(
            self, experts=replace(experts, dense_layers=0) if experts else None, delta=replace(delta, layers=self.layers) if delta else None
        )

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
        return blocks + self.embedding_parameters + self.head_parameters + self.norm_parameters + self.outside
