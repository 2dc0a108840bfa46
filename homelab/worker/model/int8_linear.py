"""A linear layer whose frozen matrix is held in 8 bits, and whose products are in the precision of its input.

bitsandbytes quantises and holds the matrix (LLM.int8: 8 bits, one scale per output). Its own product on a card is not taken: LLM.int8 rounds
the input to 8 bits too, but for columns in which any token of the pass is above a threshold. So a row's result depends on which rows share its
pass, and the curve would depend on the cluster: at the usual threshold of 6 the loss of a row of 64 tokens moves by up to 0.04 with its three
neighbours (SmolLM2-135M). A threshold of 0 makes rows independent, and rounds outliers too: the loss is 0.028 above that of the fp32 weights.
Here the matrix is dequantised for each product, as bitsandbytes does while it trains on a CPU (autograd/_functions.py, MatMul8bitFp): rows are
independent, the loss is 0.006 above, and training and evaluation, card and CPU compute the same.
"""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch


class Int8Linear(bitsandbytes.nn.Linear8bitLt):
    """`weight` [outputs, inputs] is int8, with one fp32 scale per output in `weight.SCB`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in the type of `x`, plus the bias."""
        product: torch.Tensor = _Product.apply(x, self.weight.data, self.weight.SCB)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def install(model: Any) -> None:
    """Let every 8-bit layer of a loaded model compute so."""
    for part in model.modules():
        if type(part) is bitsandbytes.nn.Linear8bitLt:
            part.__class__ = Int8Linear


def dequantised(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [outputs, inputs]. A scale is the largest absolute value of its row, which the code 127 stands for."""
    scaled = scales.unsqueeze(1) * (1 / 127)
    # In one pass over the matrix, 3 bytes per weight where a copy in `dtype` and a product need 7. The bits are the same.
    return torch.mul(codes, scaled, out=torch.empty(codes.shape, dtype=dtype, device=codes.device))


class _Product(torch.autograd.Function):
    """Keeps nothing of the input: the matrix is frozen. It is dequantised for either direction."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        ctx.codes, ctx.scales = codes, scales
        return torch.nn.functional.linear(inputs, dequantised(codes, scales, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient @ dequantised(ctx.codes, ctx.scales, gradient.dtype), None, None
