"""Stand-ins for the routed experts of a dry run, whose tokens have no values, so that nobody knows which expert they choose."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from homelab.worker.tools import fake_kernels


@contextlib.contextmanager
def experts(device: str, precision: str) -> Iterator[None]:
    """Let experts be computed: those in 16 bits as in `grouped_experts`. Where homelab computes them, every expert has as many tokens, and those in 4 bits
    make their matrices for each product, as a 4-bit layer does."""
    from homelab.worker.model import fused_experts

    counts, fused_experts.counts = fused_experts.counts, fused_experts.even
    try:
        with grouped_experts(device, precision), _matrices():
            yield
    finally:
        fused_experts.counts = counts


@contextlib.contextmanager
def _matrices() -> Iterator[None]:
    if importlib.util.find_spec("bitsandbytes") is None:  # then none are in 4 bits
        yield
        return
    from homelab.worker.model.quantised_experts import QuantisedExperts

    def matrices(self: Any, name: str, experts: Any) -> Any:
        scales = getattr(self, f"scales_{name}")[: len(experts)]
        return fake_kernels.dequantised(scales, (len(experts), *self.shapes[name]), self.dtype)

    before, QuantisedExperts.matrices = QuantisedExperts.matrices, matrices  # type: ignore[method-assign]
    try:
        yield
    finally:
        QuantisedExperts.matrices = before  # type: ignore[method-assign]


@contextlib.contextmanager
def grouped_experts(device: str, precision: str) -> Iterator[None]:
    """Let the experts of a layer be multiplied without torch's grouped product, which on tensors without values knows bf16 alone.

    The stand-in makes the product of a forward pass, and in a backward pass the gradients that are asked for. Where transformers may take its own
    product instead (integrations/moe.py: below torch 2.11, and on cards that compute no bf16), the weights' gradient is made for frozen experts,
    too: a bound above what trains. The place is private; without it nothing is changed.
    """
    import torch
    from transformers import integrations

    moe: Any = getattr(integrations, "moe", None)
    original = getattr(moe, "_grouped_mm", None)
    if original is None:
        yield
        return
    makes_all = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11) or (device == "cuda" and precision != "bf16")
    moe._grouped_mm = lambda input, weight, offs: _grouped_product().apply(input.to(weight.dtype), weight, makes_all)
    try:
        yield
    finally:
        moe._grouped_mm = original


def _grouped_product() -> Any:
    import torch

    class Product(torch.autograd.Function):
        """[rows, in] and [experts, in, out] -> [rows, out]; keeps of both what the other's gradient needs."""

        @staticmethod
        def forward(ctx: Any, inputs: Any, weights: Any, makes_all: bool) -> Any:
            ctx.wanted = tuple(makes_all or asked for asked in ctx.needs_input_grad[:2])
            ctx.like = inputs.shape, weights.shape
            of_inputs, of_weights = ctx.wanted
            ctx.save_for_backward(weights if of_inputs else None, inputs if of_weights else None)
            return inputs.new_empty((inputs.shape[0], weights.shape[2]))

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            made = [gradient.new_empty(shape) if wanted else None for shape, wanted in zip(ctx.like, ctx.wanted, strict=True)]
            return *(of if asked else None for of, asked in zip(made, ctx.needs_input_grad, strict=False)), None

    return Product
