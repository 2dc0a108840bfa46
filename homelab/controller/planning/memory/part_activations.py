"""What autograd keeps of the parts of a layer that some models have, and what they need while they compute, in bytes: routed experts, and the gated
delta rule. Pure.

A token is copied to each of its k experts. Of every copy autograd keeps gate, its activation, up and the expert's output (3 i + h elements; where gate and up
are clamped 6 i + h), of every token its scores, and of every choice a few numbers. Measured by dry runs of small models (tests/controller/planning/memory/test_mixture_memory.py).

transformers computes the delta rule in chunks of tokens, in fp32 (`torch_chunk_gated_delta_rule` in models/qwen3_5/modeling_qwen3_5.py): queries, keys and
values several times, five matrices of a chunk's tokens for each head, and the state at the end of each chunk. Fitted on dry runs of small models
(tests/controller/planning/memory/test_two_kinds_memory.py). The kernels of flash-linear-attention need less, so these are upper bounds where it is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.planning.model.layers import DeltaRule, Experts

# Of every choice: where it stood before it was sorted, twice, where it stands, and the expert's number (int64 each).
_CHOICE_BYTES = 4 * 8
_SCORE_BYTES = 4
_CHUNK = 64  # tokens that the delta rule computes together
# What attention needs at most, in bytes for each hidden feature: more than experts that are very small.
_ATTENTION = {2: 11, 4: 7}


@dataclass(frozen=True)
class Routed:
    """The experts of a layer that computes. `each`: bytes of an activation. `grows`: the gradient of their weights is made, so that they keep
    their inputs, too. `rank`: of adapters on them (`homelab.worker.model.experts_adapter`), 0 where there are none."""

    experts: Experts
    hidden: int
    each: int
    grows: bool = False
    rank: int = 0

    def saved(self) -> int:
        """Bytes per token between forward and backward."""
        wide, hidden, each = self.experts.width, self.hidden, self.each
        copy = each * ((6 if self.experts.clamps else 3) * wide + hidden) + (each * (wide + hidden) if self.grows else 0)
        copy += each * (wide + hidden + 2 * self.rank) if self.rank else 0
        return self.experts.per_token * (copy + _CHOICE_BYTES) + _SCORE_BYTES * self.experts.count

    def working(self, tokens: int) -> int:
        """Bytes that the backward pass of the layer makes for itself, beyond what it has saved.

        Where experts are narrow, most is needed when the copies of a token are added up: three times their output, in the precision of the
        weights that they are added with. Where they are wide, at the activation: three times its width, and the outputs are gone. Where the
        gradient of all weights is made, that of one matrix of all experts is there, too. Adapters on them have inputs and outputs of their own.
        """
        wide, hidden, each, taken = self.experts.width, self.hidden, self.each, self.experts.per_token
        adds = taken * (3 * (4 if self.experts.weighs_in_fp32 else each) * hidden + _CHOICE_BYTES) - hidden
        gone = (0 if self.experts.clamps else 4 * hidden) + (each * wide * taken if self.grows else 0)
        activates = taken * each * ((4 if self.experts.clamps else 5 if self.rank else 3) * wide - hidden) - gone
        most = tokens * max(adds, activates, _ATTENTION[each] * hidden)
        if not self.grows:
            return most
        matrix = each * self.experts.count * wide * hidden
        return max(most, matrix + tokens * (taken * each * wide - 6 * hidden), 2 * matrix - tokens * taken * each * (hidden + wide))


def _state(delta: DeltaRule) -> float:
    """Elements of the state of all heads, for each token of a chunk."""
    return delta.value_heads * delta.key_dim * delta.value_dim / _CHUNK


def saved_by_delta(delta: DeltaRule, each: int, *, full: bool) -> int:
    """Bytes per token of a delta rule between forward and backward, without the inputs of its linear layers. `each`: bytes of an activation; `full`: all weights are trained.

    The queries and keys of a group are repeated for each of its heads of values. In 16 bits the products take copies in 16 bits.
    """
    keys, queries, values, heads = delta.keys, delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    if each == 4:
        total = 24 * keys + 44 * queries + 40 * values + (21 * _CHUNK + 30) * heads + 4 * _state(delta)
    else:
        total = 8 * keys + 37 * queries + 30 * values + (14 * _CHUNK + 36) * heads + 8 * _state(delta)
    return round(total) + (2 * values * 2 if full else 0)


def made_by_delta(delta: DeltaRule, each: int) -> int:
    """Bytes per token that its backward pass makes for itself."""
    queries = delta.value_heads * delta.key_dim
    return 9 * queries + 2 * delta.values + 8 * _CHUNK * delta.value_heads + (4 * delta.keys if each == 2 else 0)
