"""The learning rate of a global batch: the worker trains with it, the plan shows it."""

from __future__ import annotations

import math


def scaled(learning_rate: float, scale: str, global_batch: int, reference_batch: int | None) -> float:
    """`learning_rate`, chosen for `reference_batch` samples per optimizer step, at `global_batch` samples.

    "linear" multiplies it by their ratio (Goyal et al. 2017, for SGD), "sqrt" by the root of it, which keeps the variance of a step
    (Krizhevsky 2014; Malladi et al. 2022 for Adam), "none" leaves it. Warm-up and schedule scale with it.
    """
    if scale == "none":
        return learning_rate
    assert scale in ("linear", "sqrt") and reference_batch is not None
    ratio = global_batch / reference_batch
    return learning_rate * (ratio if scale == "linear" else math.sqrt(ratio))
