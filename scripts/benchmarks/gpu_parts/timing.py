"""Seconds of a piece of work on a device, and the bytes that it took of a card at most."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def seconds(work: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """The median, after three times that do not count: kernels are chosen there. On a CPU once is enough to see that it runs."""
    import torch

    times = []
    warm, repeats = (3, repeats) if device == "cuda" else (0, 1)
    for number in range(warm + repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= warm:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def peak_bytes(work: Callable[[], Any], device: str) -> int:
    """Beyond what was allocated before; 0 on a CPU, where nobody counts."""
    import torch

    if device != "cuda":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)
