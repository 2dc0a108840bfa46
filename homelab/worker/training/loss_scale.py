"""The loss scale of fp16, the same number on every rank of every strategy.

fp16 has no numbers below 6e-8, where many gradients are: the loss is multiplied by a power of two, and the gradients are divided by it before they are
clipped. Where it was too large, a gradient is infinite: the step is skipped, and the scale halved. All ranks must find the same, also those whose
layers or shards are finite: the norm of the whole gradient tells it, which every rank has anyway (`Strategy.clip`). So no rank asks another one.

Nor may it matter which rows share a pass. The gradient of a pass of many rows overflows where those of single rows do not, and torch's GradScaler then
skips other steps (tried: full training of a small model in passes of 1, 3 and 5 rows). So the limit is on the gradient of the whole batch, at half
of what fp16 holds: a part of it reaches the end of fp16 only where other parts take most of it back.

accelerate (1.15, accelerator.py) trains on a CPU without a scale and without autocast. When the scale changes, and the names in a checkpoint, are
as in GradScaler (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

FIRST = 2.0**16
_MOST = 2.0**15  # of an element of the scaled gradient of the whole batch
_GROWTH, _BACKOFF = 2.0, 0.5
_GROWS_AFTER = 2000  # steps without an overflow, one after the other


class LossScale:
    """In the place of GradScaler, by what accelerate and the Trainer call of it."""

    def __init__(self) -> None:
        self._scale = FIRST
        self._grows_after = _GROWS_AFTER
        self._steps = 0  # without an overflow, since the last change
        self._is_overflow = False

    def get_scale(self) -> float:
        """The factor of the next loss."""
        return self._scale

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to go back from."""
        return loss.float() * self._scale

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of this rank by the scale, in place. Where one of their elements is beyond the limit, they become infinite."""
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None]
        own = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        own = [gradient for gradient in own if gradient.numel()]
        if not own:
            return
        largest = torch.stack(torch._foreach_norm(own, math.inf)).max()
        torch._foreach_mul_(own, torch.where(largest > _MOST, math.inf, 1.0 / self._scale))

    def judge(self, norm: float) -> bool:
        """Whether the step counts: by the norm of the whole gradient, which is the same number on all ranks."""
        self._is_overflow = not math.isfinite(norm)
        return not self._is_overflow

    def step(self, optimizer: Any, closure: Callable[[], float] | None = None) -> None:
        """The optimizer's step, but not after an overflow: accelerate sees that it was not called, and the learning rate waits, too."""
        if not self._is_overflow:
            optimizer.step(closure)

    def update(self) -> None:
        """Change the scale by what has become of this step."""
        self._steps = 0 if self._is_overflow else self._steps + 1
        if self._is_overflow:
            self._scale *= _BACKOFF
        elif self._steps == self._grows_after:
            # Twice the scale, where fp32 has such a number: it multiplies a loss in fp32.
            grown = self._scale * _GROWTH
            self._scale, self._steps = grown if grown <= torch.finfo(torch.float32).max else self._scale, 0

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds."""
        return {
            "scale": self._scale, "growth_factor": _GROWTH, "backoff_factor": _BACKOFF, "growth_interval": self._grows_after,
            "_growth_tracker": self._steps,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint, of any strategy."""
        self._scale, self._steps, self._grows_after = float(state["scale"]), int(state["_growth_tracker"]), int(state["growth_interval"])


def install(accelerator: Any) -> None:
    """Let accelerate train in fp16 with this scale, and with autocast on a CPU as on a card. Before it prepares a model."""
    assert accelerator.mixed_precision == "fp16", accelerator.mixed_precision
    accelerator.native_amp = True
    accelerator.scaler = LossScale()
