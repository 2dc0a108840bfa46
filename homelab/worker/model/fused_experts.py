"""The routed experts of a layer in the form that transformers gives most families: two tensors, `gate_up_proj` [experts, 2 x inner, hidden] and
`down_proj` [experts, hidden, inner]. What a layer of them computes, with any products of the experts' matrices.

The rows of a pass are sorted by expert, and all of them go through each step together: a card gets few kernels besides the products. Expert by
expert, starting the kernels of a layer of Qwen3-30B-A3B took 0.25 s of an H200 (measured).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from homelab.shared.protocol import quantisation

MATRICES = ("gate_up_proj", "down_proj")
# (name of the matrices, rows sorted by expert [rows, in], rows of each expert) -> [rows, out]
Products = Callable[[str, torch.Tensor, Sequence[int]], torch.Tensor]


def routed(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, products: Products
) -> torch.Tensor:
    """[tokens, hidden]: what transformers' own "eager" experts compute, with any products of the experts' matrices.

    Each token's experts are added in their order, in fp32, so its sum does not depend on the other tokens of the pass.
    """
    taken = top_k_index.shape[-1]
    choices = top_k_index.reshape(-1)
    order = choices.argsort(stable=True)  # by expert
    each = counts(choices, experts.num_experts)
    inner = experts._apply_gate(products("gate_up_proj", hidden_states[order // taken], each))
    outputs = products("down_proj", inner, each) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    # Where the outputs of a token are: in the order of their experts, as the rows are sorted by them.
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device)).view(-1, taken).sort(-1).values
    total = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for output in outputs[places].unbind(1):
        total = total + output
    return total.to(hidden_states.dtype)


def counts(choices: torch.Tensor, num_experts: int) -> list[int]:
    """How many rows each expert has, of the experts' numbers [tokens x k]. Without values, on the meta device, all have as many."""
    if choices.is_meta:
        return even(choices, num_experts)
    found: list[int] = torch.bincount(choices, minlength=num_experts)[:num_experts].tolist()
    return found


def even(choices: torch.Tensor, num_experts: int) -> list[int]:
    """As many rows for each expert, as far as they can be divided."""
    each, over = divmod(len(choices), num_experts)
    return [each + (number < over) for number in range(num_experts)]


def chosen(experts: Sequence[int], device: torch.device) -> Any:
    """An index of these experts: neighbours are read where they are, others are put together first."""
    first, last = experts[0], experts[-1]
    return slice(first, last + 1) if list(experts) == list(range(first, last + 1)) else torch.tensor(experts, device=device)


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
    return hasattr(part, "matrices") or any(
        weight.dim() == 3 and weight.is_floating_point() and hasattr(part, "num_experts")
        for weight in part._parameters.values()
        if weight is not None
    )


def can_be_held(part: Any) -> bool:
    """Whether this module is of that form, in 16 bits or in NF4 (`quantised_experts`)."""
    return hasattr(part, "shape_of") or fits(part)


def products(experts: Any, name: str, rows: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
    """`rows` [rows, in], sorted by expert, times the matrices `name` of their experts: [rows, out]. `experts`: a module for which `can_be_held` is true."""
    result: torch.Tensor = _Products.apply(rows, experts, name, each)
    return result.to(rows.dtype)


class _Products(torch.autograd.Function):
    """Keeps nothing of the rows: the matrices are frozen. Those in 4 bits are made for either direction."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, experts: Any, name: str, each: Sequence[int]) -> torch.Tensor:
        ctx.of = experts, name, each
        return _multiplied(rows, experts, name, each)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _multiplied(gradient, *ctx.of, is_back=True), None, None, None


def _multiplied(rows: torch.Tensor, experts: Any, name: str, each: Sequence[int], *, is_back: bool = False) -> torch.Tensor:
    """Computed in the type of the matrices, as a 4-bit layer of bitsandbytes does. `is_back`: of gradients [rows, out], those of the rows that went in."""
    if not hasattr(experts, "matrices"):
        weights = getattr(experts, name)
        return multiplied(rows.to(weights.dtype), weights, each, is_back=is_back)
    width_out, width_in = experts.shapes[name]
    rows = rows.to(experts.dtype)
    result = rows.new_empty((len(rows), width_in if is_back else width_out))
    taken = [number for number, count in enumerate(each) if count]
    at_once = quantisation.experts_at_once(width_out * width_in * rows.element_size(), len(each))
    begin = 0
    for first in range(0, len(taken), at_once):
        some = taken[first : first + at_once]
        own = [each[number] for number in some]
        end = begin + sum(own)
        result[begin:end] = multiplied(rows[begin:end], experts.matrices(name, some), own, is_back=is_back)
        begin = end
    return result


def multiplied(rows: torch.Tensor, matrices: torch.Tensor, each: Sequence[int], *, is_back: bool = False) -> torch.Tensor:
    """Rows [rows, in], sorted by expert, times matrices [experts, out, in]: [rows, out]. `is_back`: from [rows, out] to [rows, in]. No gradient."""
    if _has_grouped_product(rows, matrices):
        ends = torch.tensor(list(itertools.accumulate(each)), dtype=torch.int32, device=rows.device)
        grouped: torch.Tensor = torch.nn.functional.grouped_mm(
            rows.contiguous(), matrices if is_back else matrices.transpose(-2, -1), offs=ends
        )
        return grouped
    result = rows.new_empty((len(rows), matrices.shape[2 if is_back else 1]))
    parts = rows.split(list(each)), result.split(list(each)), matrices.unbind()
    for own, place, matrix in zip(*parts, strict=True):
        if len(own):
            torch.mm(own, matrix if is_back else matrix.t(), out=place)
    return result


def _has_grouped_product(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether the device has one kernel for all of these products: bf16 from Ampere on, whole 16 bytes in every row (torch 2.13, GroupedMMUtils.h)."""
    is_whole = all(width * rows.element_size() % 16 == 0 for width in (rows.shape[1], *matrices.shape[1:]))
    return (
        rows.device.type == "cuda"
        and rows.dtype == torch.bfloat16
        and is_whole
        and hasattr(torch.nn.functional, "grouped_mm")
        and torch.cuda.get_device_capability(rows.device) >= (8, 0)
    )
