"""The random numbers of a pass: each layer begins its own, from the seed of the micro-batch and its number in the model.

So it does not matter which layers a process holds, nor whether a layer is computed again alone: its masks are those of one process. What draws before the
first layer begins with the seed of the micro-batch, and what draws behind the last one begins with the norm there, as one layer more.
"""

from __future__ import annotations

import functools
import hashlib
import random
from typing import Any

import numpy
import torch

from homelab.worker.model import inspection
from homelab.worker.runtime.task import Task

_pass_seed = 0  # of the micro-batch that this process computes, forward or backward: torch's generator is that of the process, too


def begin(seed: int) -> None:
    """A forward pass of the micro-batch with this seed follows: every stream that a model may draw from begins."""
    again(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def again(seed: int) -> None:
    """Layers of the micro-batch with this seed may be computed again, as in its backward pass: they draw what they drew."""
    global _pass_seed
    _pass_seed = seed


def install(model: Any, task: Task) -> None:
    """Let each layer begin its own numbers, where the recipe draws any. A run that an older version began goes on in its own way."""
    layers = inspection.layers(model)
    if not task.method.draws or not task.draws_by_layer or layers is None:
        return
    norm = getattr(inspection.base_of(model).get_decoder(), "norm", None)
    for number, layer in enumerate([*layers, *([norm] if isinstance(norm, torch.nn.Module) else [])]):
        if next(layer.parameters(), None) is not None:  # not that of another stage
            layer.register_forward_pre_hook(functools.partial(_begin_layer, number, task.device == "cuda"))


def _begin_layer(number: int, is_on_card: bool, *_call: Any) -> None:
    digest = hashlib.sha256(f"homelab layer {_pass_seed} {number}".encode()).digest()
    seed = int.from_bytes(digest[:7], "big")
    torch.default_generator.manual_seed(seed)
    if is_on_card:
        torch.cuda.manual_seed(seed)
