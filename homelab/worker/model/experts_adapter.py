"""LoRA on the routed experts of a layer, in 16 bits or in 4: A [rank, in] and B [out, rank] for each matrix of each expert.

PEFT has such adapters under the name `target_parameters`, and its files are kept: its names and shapes, `lora_A` [experts x rank, in] and
`lora_B` [out, rank x experts]. What it computes is not: it adds B x A to the matrices of all experts in every pass, a second copy of them (1.2 GB for
a layer of Qwen3-30B-A3B), and it sees none in 4 bits. Here each expert that has tokens gets their product with its own A and B.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.lora.layer import ParamWrapper

from homelab.worker.model import fused_experts, inspection

Factors = tuple[torch.Tensor, torch.Tensor, float]


class ExpertsAdapter(ParamWrapper):
    """PEFT's wrapper of one matrix of all experts; that of the second one is around that of the first."""

    def get_param(self) -> torch.Tensor:
        """The matrices; of those in 4 bits a tensor of their shape."""
        experts = self.get_base_layer()
        shown: torch.Tensor = experts.shape_of(self.parameter_name) if hasattr(experts, "shape_of") else super().get_param()
        return shown

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], as the experts below compute it, with what was trained of each."""
        experts, adapters = self.get_base_layer(), self._factors()

        def products(name: str, rows: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
            result = fused_experts.products(experts, name, rows, each)
            if name not in adapters:
                return result
            a, b, scale = adapters[name]
            kind = rows.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else a.dtype
            added: torch.Tensor = _Added.apply(rows.to(dtype), a.to(dtype), b.to(dtype).contiguous(), each)
            return result + (added * scale).to(result.dtype)

        return fused_experts.routed(experts, hidden_states, top_k_index, top_k_weights, products)

    def _factors(self) -> dict[str, Factors]:
        """A [experts, rank, in], B [experts, out, rank] and their scale, by matrix."""
        found: dict[str, Factors] = {}
        part: Any = self
        while isinstance(part, ParamWrapper):
            (name,) = part.lora_A.keys()
            if not part.disable_adapters and not part.merged:
                a, b = part.lora_A[name].weight, part.lora_B[name].weight
                every_a, every_b = a.view(part.num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, part.num_experts).permute(2, 0, 1)
                found[part.parameter_name] = every_a, every_b, float(part.scaling[name])
            part = part.base_layer
        return found


class _Added(torch.autograd.Function):
    """Rows [rows, in], sorted by expert, times A and then B of their experts: [rows, out]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
        low = fused_experts.multiplied(rows, a, each)
        ctx.save_for_backward(rows, low, a, b)
        ctx.each = each
        return fused_experts.multiplied(low, b, each)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        rows, low, a, b = ctx.saved_tensors
        of_low = fused_experts.multiplied(gradient, b, ctx.each, is_back=True)
        of_rows = fused_experts.multiplied(of_low, a, ctx.each, is_back=True)
        of_a, of_b = torch.zeros_like(a), torch.zeros_like(b)  # experts without a row get none
        parts = [tensor.split(list(ctx.each)) for tensor in (rows, low, of_low, gradient)]
        for number, (own, own_low, own_of_low, own_gradient) in enumerate(zip(*parts, strict=True)):
            if len(own):
                torch.mm(own_gradient.t(), own_low, out=of_b[number])
                torch.mm(own_of_low.t(), own, out=of_a[number])
        return of_rows, of_a, of_b, None


def put_on(model: Any, config: Any) -> Any:
    """`get_peft_model`, for which routed experts in 4 bits have parameters, too; adapters on experts then compute as here. On a stage, targets that name
    the ends of the model reach those that it has."""
    elsewhere, before = getattr(model, inspection.ENDS_ELSEWHERE, None), config.exclude_modules
    if elsewhere and (isinstance(before, str) or not before):
        config.exclude_modules = "|".join([*([f"(?:{before})"] if before else []), *map(re.escape, elsewhere)])
    elif elsewhere:
        config.exclude_modules = [*before, *elsewhere]
    with _shown(model):
        adapted = get_peft_model(model, config)
    for part in adapted.modules():
        if type(part) is ParamWrapper and fused_experts.can_be_held(part.get_base_layer()):
            part.__class__ = ExpertsAdapter
    return adapted


def weights(model: Any) -> int:
    """How many weights the adapters on routed experts have."""
    found = (part for part in model.modules() if isinstance(part, ExpertsAdapter))
    return sum(weight.numel() for part in found for factors in (part.lora_A, part.lora_B) for weight in factors.parameters())


@contextlib.contextmanager
def _shown(model: Any) -> Iterator[None]:
    """While this lasts, experts in 4 bits have parameters of the shape that transformers gives them, without memory of their own."""
    held = [part for part in model.modules() if hasattr(part, "shape_of")]
    for part in held:
        part._parameters.update({name: torch.nn.Parameter(part.shape_of(name), requires_grad=False) for name in fused_experts.MATRICES})
    try:
        yield
    finally:
        for part in held:
            for name in fused_experts.MATRICES:
                part._parameters.pop(name)
