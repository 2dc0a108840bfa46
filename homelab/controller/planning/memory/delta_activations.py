"""What autograd keeps of a layer with the gated delta rule, and what it needs while it computes, in bytes per token. Pure.

transformers computes the rule in chunks of tokens, in fp32 (`torch_chunk_gated_delta_rule` in models/qwen3_5/modeling_qwen3_5.py): queries, keys and values several
times, five matrices of a chunk's tokens for each head, and the state at the end of each chunk. Fitted on dry runs of small models
(tests/controller/planning/memory/test_delta_memory.py). The kernels of flash-linear-attention need less, so these are upper bounds where it is installed.
"""

from __future__ import annotations

from homelab.controller.planning.model.layers import DeltaRule

_CHUNK = 64


def _state(delta: DeltaRule) -> float:
    """Elements of the state of all heads, for each token of a chunk."""
    return delta.value_heads * delta.key_dim * delta.value_dim / _CHUNK


def saved(delta: DeltaRule, each: int, *, full: bool) -> int:
    """Between forward and backward, without the inputs of its linear layers. `each`: bytes of an activation; `full`: all weights are trained.

    The queries and keys of a group are repeated for each of its heads of values. In 16 bits the products take copies in 16 bits.
    """
    keys, queries, values, heads = delta.keys, delta.value_heads * delta.key_dim, delta.values, delta.value_heads
    if each == 4:
        total = 24 * keys + 44 * queries + 40 * values + (21 * _CHUNK + 30) * heads + 4 * _state(delta)
    else:
        total = 8 * keys + 37 * queries + 30 * values + (14 * _CHUNK + 36) * heads + 8 * _state(delta)
    return round(total) + (2 * values * 2 if full else 0)


def working(delta: DeltaRule, each: int) -> int:
    """What its backward pass makes for itself."""
    queries = delta.value_heads * delta.key_dim
    return 9 * queries + 2 * delta.values + 8 * _CHUNK * delta.value_heads + (4 * delta.keys if each == 2 else 0)
