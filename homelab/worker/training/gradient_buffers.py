"""One copy of the gradient per rank: from the first pass on it lies in DDP's buckets, and is set to zero there instead of given away.

`gradient_as_bucket_view` alone does not do that. The Trainer's `model.zero_grad()` leaves no gradient at all (set_to_none), so the next
backward pass makes new ones, and in a step of several passes they grow beside the buckets until the last pass copies them in
(torch/nn/parallel/distributed.py; tried): 4 bytes more for every weight that is trained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def make(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Gradients of zero, before the model is wrapped: DDP takes those it finds into its buckets (reducer.cpp, initialize_bucket_views)."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def keep(wrapped: Any) -> None:
    """Make `wrapped.zero_grad()` set the gradients to zero in place."""
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]

    def zero_grad(set_to_none: bool = False) -> None:
        with torch.no_grad():
            torch._foreach_zero_([parameter.grad for parameter in trained if parameter.grad is not None])

    wrapped.zero_grad = zero_grad
