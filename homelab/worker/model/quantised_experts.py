"""The routed experts of a layer, held in 4 bits (NF4). It takes the place of transformers' own module, which holds them in 16 bits.

transformers keeps the experts of a layer in two tensors, `gate_up_proj` [experts, 2 x inner, hidden] and `down_proj` [experts, hidden, inner].
bitsandbytes quantises linear layers alone, so that of Qwen3-30B-A3B 58 GB of 61 GB would stay as they are.

Each matrix of each expert is quantised alone, in the settings of all other layers: an expert can be read without its neighbours. A pass
dequantises the experts that its tokens chose, some at a time, in either direction, and keeps none of these matrices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState

from homelab.shared.protocol.quantisation import NF4, NF4_BLOCK, NF4_DOUBLE_BLOCK
from homelab.worker.model import weight_digests
from homelab.worker.model.fused_experts import MATRICES, chosen, products, routed

_PARTS = ("codes", "scales", "double_scales", "offset")


class QuantisedExperts(torch.nn.Module):
    """Of a matrix `name` with n weights in each of E experts, b = ceil(n / 64): buffers `codes_name` [E, 32 b] uint8, `scales_name` [E, b] uint8,
    `double_scales_name` [E, ceil(b / 256)] fp32 and `offset_name` [E] fp32, as bitsandbytes makes them (functional.py, quantize_4bit)."""

    def __init__(self, experts: Any, *, awaits: bool = False) -> None:
        """`experts`: transformers' module, for which `fused_experts.fits` is true; its weights are not read. The buffers are empty. With `awaits` there
        are parameters as transformers has them, each until `hold` gets its values."""
        super().__init__()
        self.num_experts: int = experts.num_experts
        self.dtype: torch.dtype = experts.gate_up_proj.dtype
        self.shapes = {name: tuple(getattr(experts, name).shape[1:]) for name in MATRICES}
        self.sources: dict[str, str] = {}  # digests of what was quantised
        self._apply_gate = experts._apply_gate  # bound to transformers' module, which is no part of the model any more
        for name in MATRICES:
            weights = getattr(experts, name)
            delattr(experts, name)
            if awaits:
                self.register_parameter(name, weights.requires_grad_(False))
                continue
            for part, (shape, dtype) in _sizes(self.num_experts, self.shapes[name]).items():
                self.register_buffer(f"{part}_{name}", torch.empty(shape, dtype=dtype, device=weights.device))
        self._is_hf_initialized = True  # transformers draws nothing for it

    @torch.no_grad()
    def hold(self, name: str, weights: torch.Tensor, device: torch.device | str | int | None = None) -> None:
        """Quantise `weights` [E, out, in], the matrices `name` of all experts, on `device` (None: where they are), which has one of them in 16 bits at a time."""
        device = weights.device if device is None else device
        held = {
            part: torch.zeros(shape, dtype=dtype, device=device)
            for part, (shape, dtype) in _sizes(self.num_experts, self.shapes[name]).items()
        }
        sources = {}
        for number, matrix in enumerate(weights):
            codes, state = bitsandbytes.functional.quantize_4bit(
                matrix.to(device).contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type=NF4
            )
            held["codes"][number, : codes.numel()] = codes.view(-1)
            held["scales"][number], held["double_scales"][number], held["offset"][number] = state.absmax, state.state2.absmax, state.offset
            sources[str(number)] = getattr(state, weight_digests.SOURCE, "")
        self._parameters.pop(name, None)
        for part, values in held.items():
            self.register_buffer(f"{part}_{name}", values)
        self.dtype = weights.dtype
        if all(sources.values()):
            self.sources[name] = weight_digests.joined(sources)

    def matrices(self, name: str, experts: Sequence[int]) -> torch.Tensor:
        """What the 4 bits of these experts' matrices stand for: [number of experts, out, in] in the dtype of the weights that were quantised. A scale is made as
        bitsandbytes makes it (functional.py, dequantize_4bit), of all these experts at once."""
        some = chosen(experts, getattr(self, f"offset_{name}").device)
        codes, scales, double_scales, offset = (getattr(self, f"{part}_{name}")[some] for part in _PARTS)
        shape, (count, blocks) = self.shapes[name], scales.shape
        table, double_table = _tables(codes.device)
        absmax = double_table[scales.int()].mul_(double_scales.repeat_interleave(NF4_DOUBLE_BLOCK, 1)[:, :blocks]).add_(offset.unsqueeze(1))
        state = QuantState(
            absmax=absmax.view(-1), shape=torch.Size((count, blocks * NF4_BLOCK)), code=table, blocksize=NF4_BLOCK, quant_type=NF4, dtype=self.dtype
        )  # fmt: skip
        weights = bitsandbytes.functional.dequantize_4bit(codes.view(-1, 1), state)
        return weights[:, : shape[0] * shape[1]].reshape(count, *shape)

    def shape_of(self, name: str) -> torch.Tensor:
        """A tensor of the shape that transformers' matrices of this name have, [E, out, in], and of one number."""
        return torch.zeros((), device=getattr(self, f"offset_{name}").device).expand(self.num_experts, *self.shapes[name])

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden], of the experts [tokens, k] that each token chose and their weights [tokens, k]."""
        return routed(self, hidden_states, top_k_index, top_k_weights, functools.partial(products, self))


def _sizes(experts: int, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each buffer of matrices of this shape. An expert's codes fill whole blocks, so that each begins at a whole address."""
    blocks = -(-shape[0] * shape[1] // NF4_BLOCK)
    return {
        "codes": ((experts, blocks * NF4_BLOCK // 2), torch.uint8),
        "scales": ((experts, blocks), torch.uint8),
        "double_scales": ((experts, -(-blocks // NF4_DOUBLE_BLOCK)), torch.float32),
        "offset": ((experts,), torch.float32),
    }


@functools.lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the 16 codes, and of the 256 codes of a scale."""
    functional = bitsandbytes.functional
    return functional.get_4bit_type(NF4, device=device), functional.create_dynamic_map().to(device)
