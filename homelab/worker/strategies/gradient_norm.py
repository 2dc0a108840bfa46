"""The norm of the whole gradient, bit-identical on every rank, and gradient clipping by it.

With copies of the model all ranks hold the same summed gradient, and each measures it by itself; of a divided one each measures its
part, and the squares are added. In fp32 the last digits of such a sum depend on the order in
which a card or a processor adds it up, so that unlike ranks would scale by unlike factors, and their weights would part. Sums in float64
differ in their 16th digit; rounded to fp32 once, they are the same number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

_BLOCK = 1 << 20  # elements; a processor turns what it sums up into float64 first: 8 MiB at a time


@torch.no_grad()
def clip(
    gradients: list[torch.Tensor], most: float, whole: Callable[[float], float] = lambda square: square, copies: Sequence[torch.Tensor] = ()
) -> float:
    """The Euclidean norm of all gradients together, before they are scaled in place to be at most `most` long. 0 where there are none.

    `whole` makes of the squared norm of these the one of all ranks' together. `copies` are scaled, too, but another rank counts them.

    Infinite or NaN where a gradient is; what the gradients are then is of no use.
    """
    own = [gradient for gradient in gradients if gradient.numel()]  # a rank's part of a small tensor may be nothing
    parts = torch.stack(_norms(own)).tolist() if own else []  # on a card: the only place where the processor waits for it
    norm = float(torch.tensor(math.sqrt(whole(math.fsum(part * part for part in parts))), dtype=torch.float32))
    scale = most / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ does
    scaled = [*own, *copies]
    if scaled and scale < 1.0:
        torch._foreach_mul_(scaled, scale)
    return norm


def _norms(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norms in float64 of groups of tensors. The norm of these norms is the norm of all elements."""
    if gradients[0].is_cuda:
        return list(torch._foreach_norm(gradients, 2.0, dtype=torch.float64))  # a few kernels for all of them, without a copy
    blocks = [block for gradient in gradients for block in gradient.flatten().split(_BLOCK)]
    return [torch.linalg.vector_norm(block, dtype=torch.float64) for block in blocks]
