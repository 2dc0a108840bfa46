"""Memory of the host beside a card: pinned, so that the card reads and writes it by itself, as far as the system gives it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch


def empty(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """An empty tensor of the host. A system that pins no more (WSL2, a limit of locked memory) may have memory all the same: the numbers are the same, and
    copies are slower. Raises RuntimeError where it has none."""
    if pinned:
        with contextlib.suppress(RuntimeError):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
    return torch.empty(shape, dtype=dtype)
