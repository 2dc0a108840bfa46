"""What a training holds between two steps: the profiler tells of memory only what changes after its start.

On a card torch's allocator counts all it has given out, and the profiler says that number at every change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def of(model: torch.nn.Module, optimizer: Any, device: str) -> int:
    """Bytes of weights, buffers, gradients and the optimizer's state on a processor, each storage once; 0 on a card."""
    if device != "cpu":
        return 0
    storages = {}
    for tensor in _tensors(model, optimizer):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))
