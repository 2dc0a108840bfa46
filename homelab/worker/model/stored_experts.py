"""The routed experts of a layer as the files of gpt-oss have them: MXFP4, numbers of 4 bits with one exponent for 32 of them. It takes the place of
transformers' own module, which holds them in 16 bits: 38 GB of gpt-oss-20b, where the files have 10 GB.

Nothing is rounded: a number of MXFP4 (OCP Microscaling Formats, version 1.0) is one of bf16, too. So it is the training of experts in 16 bits. A pass
makes the matrices of some experts at a time, in either direction, as it does of NF4 (`quantised_experts`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.quantizers import auto
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from homelab.shared.protocol.quantisation import MXFP4, MXFP4_BLOCK
from homelab.worker.model.fused_experts import MATRICES, chosen, products, routed

# What the codes 0 to 15 stand for: one bit for the sign, two for the exponent, one for the rest.
_VALUES = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
_PAIRS = tuple((_VALUES[byte % 16], _VALUES[byte // 16]) for byte in range(256))  # a byte's two numbers
_EXPONENT_OF_ONE = 127


class StoredExperts(torch.nn.Module):
    """Of a matrix `name` [out, in] in each of E experts, with the names of the files: buffers `name_blocks` [E, out, in / 32, 16] uint8, two numbers in a
    byte, and `name_scales` [E, out, in / 32] uint8, exponents of two; and the parameter `name_bias` [E, out]."""

    def __init__(self, experts: Any) -> None:
        """`experts`: transformers' module, for which `fits` is true; its matrices are not read. The buffers are empty."""
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.shapes = {name: tuple(getattr(experts, name).transpose(1, 2).shape[1:]) for name in MATRICES}
        self._pairs = torch.empty(0)
        self._apply_gate = experts._apply_gate  # bound to transformers' module, which is no part of the model any more
        for name, (width_out, width_in) in self.shapes.items():
            device = getattr(experts, name).device
            delattr(experts, name)
            self.register_parameter(f"{name}_bias", experts._parameters.pop(f"{name}_bias").requires_grad_(False))
            scales = (self.num_experts, width_out, width_in // MXFP4_BLOCK)
            self.register_buffer(f"{name}_blocks", torch.empty((*scales, MXFP4_BLOCK // 2), dtype=torch.uint8, device=device))
            self.register_buffer(f"{name}_scales", torch.empty(scales, dtype=torch.uint8, device=device))
        self._is_hf_initialized = True  # transformers draws nothing for it

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        found: torch.dtype = self.down_proj_bias.dtype
        return found

    def matrices(self, name: str, experts: Sequence[int]) -> torch.Tensor:
        """What these experts' matrices are: [number of experts, out, in]."""
        blocks, scales = getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")
        some = chosen(experts, blocks.device)
        if self._pairs.device != blocks.device or self._pairs.dtype != self.dtype:
            # Once: a copy to a card for each expert would take longer than its product.
            self._pairs = torch.tensor(_PAIRS, dtype=self.dtype, device=blocks.device)
        values = torch.nn.functional.embedding(blocks[some].int(), self._pairs).flatten(-2)
        torch.ldexp(values, (scales[some].int() - _EXPONENT_OF_ONE).unsqueeze(-1), out=values)
        return values.view(len(experts), *self.shapes[name])

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], of the experts [tokens, k] that each token chose and their weights [tokens, k]."""

        def with_biases(name: str, rows: torch.Tensor, each: Sequence[int]) -> torch.Tensor:
            biases = getattr(self, f"{name}_bias")
            of_rows = torch.tensor(each, device=biases.device)
            return products(self, name, rows, each) + biases.repeat_interleave(of_rows, 0, output_size=len(rows))

        return routed(self, hidden_states, top_k_index, top_k_weights, with_biases)


@contextlib.contextmanager
def read_by(name: str, quantiser: type) -> Iterator[None]:
    """While this lasts, transformers reads files of this name in its table of quantisers by another one."""
    before = auto.AUTO_QUANTIZER_MAPPING[name]
    auto.AUTO_QUANTIZER_MAPPING[name] = quantiser
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING[name] = before


def left() -> contextlib.AbstractContextManager[None]:
    """While this lasts, transformers leaves routed experts in MXFP4, where they are in the form of gpt-oss, and makes all others wide."""
    return read_by(MXFP4, _Quantiser)


class _Quantiser(Mxfp4HfQuantizer):
    is_left = False

    def _process_model_before_weight_loading(self, model: Any, *args: Any, **kwargs: Any) -> None:
        self.is_left = install(model)
        if not self.is_left:
            super()._process_model_before_weight_loading(model, *args, **kwargs)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Blocks and scales go to buffers of their own names."""
        if self.is_left:
            return weight_conversions
        updated: list[Any] = super().update_weight_conversions(weight_conversions, model)
        return updated


def fits(part: Any) -> bool:
    """Whether this module is transformers' experts in the form of gpt-oss: inputs before outputs, with biases, in whole blocks."""
    return (
        {name for name, _ in part.named_parameters(recurse=False)} == {*MATRICES, *(f"{name}_bias" for name in MATRICES)}
        and hasattr(part, "_apply_gate")
        and all(getattr(part, key, False) for key in ("has_gate", "has_bias", "is_transposed"))
        and all(getattr(part, name).dim() == 3 and getattr(part, name).shape[1] % MXFP4_BLOCK == 0 for name in MATRICES)
    )


def install(model: Any) -> bool:
    """Put `StoredExperts` in the place of all modules where they fit; whether there was one."""
    found = [(name, part) for name, part in model.named_modules() if fits(part)]
    for name, part in found:
        model.set_submodule(name, StoredExperts(part))
    return bool(found)
