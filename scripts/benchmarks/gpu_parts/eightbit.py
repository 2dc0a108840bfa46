"""A base of 8 bits on a card: codes and loss beside those of a CPU, how it is made into 16 bits, and its speed and memory beside 4 and 16 bits."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, timing
from benchmarks.gpu_parts.place import Place

from homelab.shared.protocol.quantisation import INT8, NF4

_BASES = {"16_bit": None, "8_bit": INT8, "4_bit": NF4}
_LOSS = 1e-2  # a card's products of 16 bits beside those of a CPU in fp32


def measure(place: Place) -> None:
    """Bits first: a difference is a note of the run, or nodes would refuse each other's base."""
    if importlib.util.find_spec("bitsandbytes") is None:
        place.run("bitsandbytes", problem="it is not installed here: there is no base of 8 bits")
        return
    with place.attempt("codes"):
        _codes(place)
    with place.attempt("dequantisation"):
        _dequantisation(place)
    small = material.model(place.folder / "small", "small" if place.is_card else "tiny", "float16", place.device)
    with place.attempt("loss"):
        _loss(place, small)
    large = material.model(place.folder / "large", "1.1B", device=place.device) if place.is_card else small
    for name, quantisation in _BASES.items():
        with place.attempt(f"base of {name}"):
            _base(place, name, quantisation, large)


def _codes(place: Place) -> None:
    """The same matrix in 8 bits on this device and on the CPU: an approximate division may round a code otherwise."""
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant

    torch.manual_seed(0)
    matrix = (torch.randn(4096, 4096) if place.is_card else torch.randn(64, 64)).half()
    here, there = int8_vectorwise_quant(matrix.to(place.device)), int8_vectorwise_quant(matrix)
    differ = int((here[0].cpu() != there[0]).sum())
    scales = int((here[1].cpu() != there[1]).sum())
    place.run("codes", weights=matrix.numel(), codes_differ=differ, scales_differ=scales)
    place.figure("codes_that_differ", differ)
    place.figure("scales_that_differ", scales)


def _dequantisation(place: Place) -> None:
    """One pass over the matrix, and a copy with a product: the same bits, and seconds of each."""
    import torch

    from homelab.worker.model import int8_linear

    size, dtype = (4096, torch.bfloat16) if place.is_card else (64, torch.float32)
    codes = torch.randint(-127, 128, (size, size), dtype=torch.int8, device=place.device)
    scales = torch.rand(size, device=place.device)

    def copied() -> Any:
        return codes.to(dtype).mul_(scales.unsqueeze(1) * (1 / 127))

    place.figure("dequantised_s", timing.seconds(lambda: int8_linear.dequantised(codes, scales, dtype), place.device))
    place.figure("dequantised_with_a_copy_s", timing.seconds(copied, place.device))
    place.gate(
        "dequantised_by_its_own_rule",
        bool(torch.equal(int8_linear.dequantised(codes, scales, torch.float32), codes.float() * (scales.unsqueeze(1) * (1 / 127)))),
    )


def _loss(place: Place, model: Path) -> None:
    """The loss of the same tokens by the 8-bit base on this device and on the CPU."""
    import torch

    torch.manual_seed(1)
    tokens = torch.randint(3, 250, (2, 64))
    here = _loss_of(model, tokens, place.device)
    there = here if place.device == "cpu" else _loss_of(model, tokens, "cpu")
    place.run("loss", here=here, on_a_cpu=there)
    place.figure("loss_beside_a_cpu", abs(here - there) / there)
    place.gate("loss_is_that_of_a_cpu", abs(here - there) <= _LOSS * there)


def _loss_of(model: Path, tokens: Any, device: str) -> float:
    import torch

    base = _loaded(model, INT8, device)
    tokens = tokens.to(device)
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        return float(base(input_ids=tokens, labels=tokens).loss)


def _loaded(model: Path, quantisation: str | None, device: str) -> Any:
    import torch

    from homelab.worker.model.build import load_base

    return load_base(
        str(model), None, quantisation, torch.bfloat16 if device == "cuda" else torch.float32, 0 if device == "cuda" else None, "here"
    )


def _base(place: Place, name: str, quantisation: str | None, model: Path) -> None:
    """Bytes at the peak of loading and held after it, and tokens per second with adapters on it."""
    import torch

    held: list[Any] = []
    peak = timing.peak_bytes(lambda: held.append(_loaded(model, quantisation, place.device)), place.device)
    after = torch.cuda.memory_allocated() if place.is_card else 0
    tokens, seconds = _step(place, held.pop(), quantisation)
    place.run(f"base of {name}", load_peak_bytes=peak, held_bytes=after, seconds=seconds)
    place.figure(f"{name}_load_peak_bytes", peak)
    place.figure(f"{name}_tokens_per_s", tokens / seconds)
    gc.collect()
    if place.is_card:
        torch.cuda.empty_cache()


def _step(place: Place, base: Any, quantisation: str | None) -> tuple[int, float]:
    """(tokens, seconds) of a pass forward and backward with adapters on the base."""
    import torch

    from homelab.shared.recipe import Method
    from homelab.worker.model.build import add_adapters

    trained = add_adapters(base, Method("qlora" if quantisation == NF4 else "lora", rank=16, alpha=32, targets="all-linear"), 1).train()
    rows, length = (4, 512) if place.is_card else (1, 16)
    tokens = torch.randint(3, 250, (rows, length), device=place.device)

    def step() -> None:
        with torch.autocast(place.device, torch.bfloat16, enabled=place.is_card):
            trained(input_ids=tokens, labels=tokens).loss.backward()

    return rows * length, timing.seconds(step, place.device, 8)
