"""Seconds of an optimizer step: AdamW as foreach, fused, and in 8 bits; and where paged state lies after it was loaded."""

from __future__ import annotations

import importlib.util
from typing import Any

from benchmarks.gpu_parts import timing
from benchmarks.gpu_parts.place import Place


def measure(place: Place) -> None:
    """Tensors of adapters (504 small ones, as of a 7B) and of a full training (22 layers of a 1.1B)."""
    kinds = {"adapters": [(16, 4096)] * 504, "full": [(2048, 2048), (5632, 2048)] * 22} if place.is_card else {"tiny": [(8, 8)] * 6}
    for name, shapes in kinds.items():
        for way in ("foreach", "fused", "adamw_8bit"):
            with place.attempt(f"{way}, {name}"):
                _steps(place, name, way, shapes)
    if place.is_card and importlib.util.find_spec("bitsandbytes"):
        with place.attempt("paged state"):
            _paged(place)


def _steps(place: Place, name: str, way: str, shapes: list[tuple[int, int]]) -> None:
    optimizer = _optimizer(way, _weights(shapes, place.device), place)
    if optimizer is None:
        return
    optimizer.step()  # its state is made here
    held = timing.peak_bytes(optimizer.step, place.device)
    spent = timing.seconds(optimizer.step, place.device)
    place.run(f"{way}, {name}", seconds=spent, bytes=held)
    place.figure(f"{name}_{way}_ms", 1000 * spent)


def _weights(shapes: list[tuple[int, int]], device: str) -> list[Any]:
    import torch

    weights = []
    for shape in shapes:
        weight = torch.nn.Parameter(torch.randn(shape, device=device))
        weight.grad = torch.randn_like(weight)
        weights.append(weight)
    return weights


def _optimizer(way: str, weights: list[Any], place: Place) -> Any:
    import torch

    if way in ("foreach", "fused"):
        return torch.optim.AdamW(weights, lr=1e-6, **{way: True})
    if not place.is_card or importlib.util.find_spec("bitsandbytes") is None:
        return None
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(weights, lr=1e-6)


def _paged(place: Place) -> None:
    """A few MB only. Loaded as the worker resumes, the state is still paged (`is_paged` of bitsandbytes' tensors), and a step takes it."""
    import bitsandbytes
    import torch

    from homelab.worker.checkpoints import optimizer_state

    def state(optimizer: Any) -> dict[str, Any]:
        tensor = next(iter(optimizer.state.values()))["state1"]
        return {
            "device": str(tensor.device),
            "is_paged": bool(getattr(tensor, "is_paged", False)),
            "bytes": tensor.numel() * tensor.element_size(),
        }

    first = bitsandbytes.optim.PagedAdamW8bit(_weights([(1024, 1024)] * 4, "cuda"), lr=1e-6)
    first.step()
    second = bitsandbytes.optim.PagedAdamW8bit(_weights([(1024, 1024)] * 4, "cuda"), lr=1e-6)
    torch.cuda.synchronize()  # the host reads memory that the card may still write
    torch.save(first.state_dict(), place.folder / "optimizer.pt")
    optimizer_state.load(second, place.folder / "optimizer.pt", torch.device("cuda", 0))
    second.step()
    torch.cuda.synchronize()
    place.run("paged state", before=state(first), after=state(second))
    place.gate("state_is_paged_after_loading", state(second)["is_paged"])
