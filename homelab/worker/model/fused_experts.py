"""The routed experts of a layer in the form that transformers gives most families: two tensors, `gate_up_proj` [experts, 2 x inner, hidden] and
`down_proj` [experts, hidden, inner]. What a layer of them computes, with any product of one expert's matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MATRICES = ("gate_up_proj", "down_proj")
Product = Callable[[str, int, torch.Tensor], torch.Tensor]


def routed(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, product: Product
) -> torch.Tensor:
    """[tokens, hidden]: what transformers' own "eager" experts compute, with any product of an expert's matrix.

    Each token's experts are added in their order, in fp32, so its sum does not depend on the other tokens of the pass.
    """
    places = top_k_index.reshape(-1)
    order = places.argsort(stable=True)  # by expert
    tokens = order // top_k_index.shape[-1]
    given, weights = hidden_states[tokens], top_k_weights.reshape(-1)[order].unsqueeze(-1)
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    begin = 0
    for expert, count in enumerate(counts(places, experts.num_experts)):
        own = slice(begin, begin + count)
        begin += count
        if count:
            inner = experts._apply_gate(product("gate_up_proj", expert, given[own]))
            total.index_add_(0, tokens[own], (product("down_proj", expert, inner) * weights[own]).to(total.dtype))
    return total.to(hidden_states.dtype)


def counts(places: torch.Tensor, num_experts: int) -> list[int]:
    """How many tokens each expert has, of the experts' numbers [tokens x k]. Without values, on the meta device, all have as many."""
    if places.is_meta:
        return even(places, num_experts)
    found: list[int] = torch.bincount(places, minlength=num_experts)[:num_experts].tolist()
    return found


def even(places: torch.Tensor, num_experts: int) -> list[int]:
    """As many tokens for each expert, as far as they can be divided."""
    each, over = divmod(len(places), num_experts)
    return [each + (number < over) for number in range(num_experts)]


def fits(part: Any) -> bool:
    """Whether this module is transformers' fused experts in the form that can be held in 4 bits: no biases, gate before up, outputs before inputs."""
    return (
        is_fused(part)
        and {name for name, _ in part.named_parameters()} == {*MATRICES}
        and not any(True for _ in part.buffers())
        and hasattr(part, "_apply_gate")
        and bool(getattr(part, "has_gate", False) and getattr(part, "is_concatenated", False))
        and not any(getattr(part, key, True) for key in ("has_bias", "is_transposed", "has_post_expert_norm"))
    )


def is_fused(part: Any) -> bool:
    """Whether this module has the matrices of several experts in tensors of its own, as they are read."""
    return any(
        weight.dim() == 3 and weight.is_floating_point() and hasattr(part, "num_experts")
        for weight in part._parameters.values()
        if weight is not None
    )


def can_be_held(part: Any) -> bool:
    """Whether this module is of that form, in 16 bits or in 4 (`quantised_experts`)."""
    return hasattr(part, "shape_of") or fits(part)


def product(experts: Any, name: str, expert: int, inputs: torch.Tensor) -> torch.Tensor:
    """`inputs` [tokens, in] times the matrix `name` of one expert: [tokens, out]. `experts`: a module for which `can_be_held` is true."""
    if hasattr(experts, "shape_of"):
        in_4_bits: torch.Tensor = experts.product(name, expert, inputs)
        return in_4_bits
    return torch.nn.functional.linear(inputs, getattr(experts, name)[expert])
