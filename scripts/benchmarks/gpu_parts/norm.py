"""The norm of a gradient in fp32 and in float64 over different layouts, and what an exact digest of a model's bits costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts import timing
from benchmarks.gpu_parts.place import Place


def measure(place: Place) -> None:
    """Layouts of the same numbers stand for cards that add up in another order: torch's own norm in fp32, the worker's in float64."""
    import torch

    from homelab.worker.model import weight_digests
    from homelab.worker.strategies import gradient_norm

    count, pieces = (2**26, 504) if place.is_card else (2**12, 8)
    torch.manual_seed(0)
    whole = torch.randn(count, device=place.device)
    layouts = [[_with_gradient(piece) for piece in whole.chunk(number)] for number in (1, 7, pieces)]
    ways: dict[str, Callable[[list[Any]], float]] = {
        "float32": lambda layout: float(torch.nn.utils.get_total_norm([parameter.grad for parameter in layout])),
        "float64": lambda layout: gradient_norm.clip(layout, math.inf),
    }
    for name, norm in ways.items():
        norms = [norm(layout) for layout in layouts]
        spent = timing.seconds(lambda norm=norm: norm(layouts[-1]), place.device)
        place.run(f"norm, {name}", norms=norms, seconds=spent)
        place.figure(f"norm_{name}_distinct", len(set(norms)))
        place.figure(f"norm_{name}_ms", 1000 * spent)
    place.gate("float64_norms_are_the_same_bits", len({ways["float64"](layout) for layout in layouts}) == 1)
    base = torch.randn(count * 4 if place.is_card else count, device=place.device).to(torch.bfloat16)
    spent = timing.seconds(lambda: weight_digests.each({"base": base}), place.device, 5)
    place.run("digest of bits", bytes=base.nbytes, seconds=spent, digest=weight_digests.each({"base": base})["base"])
    place.figure("digest_gb_per_s", base.nbytes / 1e9 / spent)


def _with_gradient(numbers: Any) -> Any:
    """A parameter whose gradient these are."""
    import torch

    parameter = torch.nn.Parameter(numbers)
    parameter.grad = numbers
    return parameter
