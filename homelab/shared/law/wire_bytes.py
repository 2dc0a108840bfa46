"""How many bytes a rank sends for a collective, and how many elements of a gradient with PowerSGD, and from which step on (Vogels et al. 2019)."""

from __future__ import annotations

BUCKET_MB = 25.0  # of DDP, unless the recipe names another size (torch/nn/parallel/distributed.py)
POWERSGD_RANK = 4
"""Columns of the narrow matrices."""
POWERSGD_WORTH = 2
"""A matrix is compressed where that makes it smaller by more than this factor (torch's own default)."""
_FULL_PART = 0.1  # of all steps are uncompressed at first: early gradients suffer most (torch's documentation)
_DDP_STEPS = 2  # DDP lays out its buckets anew after its first step, and PowerSGD keeps its errors per bucket


def reduced(size_bytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends in a ring all-reduce of `size_bytes`: 2 (W - 1) / W of them (Patarasuk and Yuan 2009)."""
    return 2 * gathered(size_bytes, ranks)


def gathered(size_bytes: float, ranks: int) -> float:
    """The same of an all-gather, or of a reduce-scatter, whose whole is `size_bytes`: (W - 1) / W of them."""
    return (ranks - 1) / ranks * size_bytes


def powersgd_elements(rows: int, columns: int) -> int:
    """Elements that go over the wire for a matrix of this shape."""
    narrow = (rows + columns) * POWERSGD_RANK
    return narrow if narrow * POWERSGD_WORTH < rows * columns else rows * columns


def uncompressed_steps(steps: int, warmup_steps: int, resume_step: int) -> int:
    """Steps of an attempt before PowerSGD begins: the first tenth of a run and its warm-up, and two after every start."""
    return max(_DDP_STEPS, warmup_steps - resume_step, int(_FULL_PART * steps) - resume_step)
