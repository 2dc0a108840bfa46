"""The norm of a gradient in fp32 and in float64 over different layouts, and what an exact digest of a model's bits costs."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_parts import timing
from benchmarks.gpu_parts.place import Place


def measure(place: Place) -> None:
    """Layouts of the same numbers stand for cards that add up in another order."""
    import torch

    count, pieces = (2**26, 504) if place.is_card else (2**12, 8)
    torch.manual_seed(0)
    whole = torch.randn(count, device=place.device)
    layouts = [list(whole.chunk(number)) for number in (1, 7, pieces)]
    for dtype in (torch.float32, torch.float64):
        norms = [_norm(layout, dtype) for layout in layouts]
        name = str(dtype).removeprefix("torch.")
        spent = timing.seconds(lambda dtype=dtype: _norm(layouts[-1], dtype), place.device)
        place.run(f"norm, {name}", norms=norms, seconds=spent)
        place.figure(f"norm_{name}_distinct", len(set(norms)))
        place.figure(f"norm_{name}_ms", 1000 * spent)
    place.gate("float64_norms_are_the_same_bits", len({_norm(layout, torch.float64) for layout in layouts}) == 1)
    base = torch.randn(count * 4 if place.is_card else count, device=place.device).to(torch.bfloat16)
    spent = timing.seconds(lambda: _digest(base), place.device, 5)
    place.run("digest of bits", bytes=base.numel() * 2, seconds=spent, digest=_digest(base))
    place.figure("digest_gb_per_s", base.numel() * 2 / 1e9 / spent)


def _norm(tensors: list[Any], dtype: Any) -> float:
    """As torch.nn.utils.clip_grad_norm_ has it: the norm of the norms; rounded to fp32, as it is used."""
    import torch

    norms = torch._foreach_norm(tensors, 2, dtype=dtype)
    return float(torch.linalg.vector_norm(torch.stack(norms)).to(torch.float32))


def _digest(tensor: Any) -> int:
    """The sum of its bits as whole numbers: exact, in any order."""
    import torch

    return int(tensor.view(torch.int16).sum(dtype=torch.int64))
