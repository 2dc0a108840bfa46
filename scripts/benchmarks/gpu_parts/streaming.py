"""Layers that come from the host on a card: bytes per second, gradients beside those of resident layers, seconds and memory of a step, whole trainings.

A card's fast attention adds up its gradients in an order that changes from pass to pass: what a resident model differs from itself by is told, and bits are
compared with plain attention, whose order is fixed.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks import stream
from benchmarks.gpu_parts import divided, material, ranks
from benchmarks.gpu_parts.divided import Division
from benchmarks.gpu_parts.place import Place

from homelab.shared.protocol.quantisation import NF4

_COPIED_BYTES = 256 * 2**20
_BASES = {"4_bit": NF4, "16_bit": None}
_ENDS_S = 60.0
_BUDGET_BYTES = 4 * 10**9


def measure(place: Place) -> None:
    """Whole trainings first, which no card has run well: a card's copy that overwrites what computes would be silent."""
    small = material.model(place.folder / "small", "small" if place.is_card else "tiny", "float32", place.device)
    with place.attempt("a training"):
        _training(place, small)
    with place.attempt("a small card"):
        _small_card(place)
    if place.is_card:
        with place.attempt("bytes per second"):
            _rates(place)
    for name, how in _BASES.items():
        with place.attempt(f"small, {name}"):
            _beside_resident(place, f"small_{name}", small, how, tokens=64)
    with place.attempt("the last resorts"):
        _last_resorts(place, small, NF4)
    if place.is_card:
        large = material.model(place.folder / "large", "1.1B", device=place.device)
        for name, how in _BASES.items():
            with place.attempt(f"1.1B, {name}"):
                _beside_resident(place, f"large_{name}", large, how, tokens=1024)


def _rates(place: Place) -> None:
    import torch

    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        here = torch.ones(_COPIED_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        seconds = []
        for _ in range(6):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            there.copy_(here, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began_s)
        place.figure(f"{name}_bytes_per_s", _COPIED_BYTES / statistics.median(seconds[1:]))


def _beside_resident(place: Place, name: str, files: Any, how: str | None, *, tokens: int) -> None:
    """All layers streamed, all passes of the step at once and one after the other: gradients equal to the bit, seconds and bytes of a step.

    A streamed model that is compared with the passes in another order is the control: its sums are others.
    """
    import torch

    device, dtype = torch.device(place.device), torch.bfloat16 if place.is_card else torch.float32
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in stream.batches_of(4, tokens)]
    resident = stream.model(files, None, how=how, dtype=dtype, device=device)
    seen = []
    for one in ("fast", "fast again", "plain"):
        with _attention(place, is_plain=one == "plain"):
            seen.append(_steps(place, lambda model=resident: stream.in_order(model, batches, dtype), resident))
    expected, again, plain = seen
    place.figure(f"{name}_resident_differs_from_itself_by", _apart(again, expected))
    del resident
    for group in (4, 1):
        streamed = stream.model(files, host := stream.host_of(device), how=how, dtype=dtype, device=device)

        def passes(given: list[Any], model: Any = streamed, host: Any = host, group: int = group) -> None:
            stream.by_layer(model, host, given, dtype, group)

        found = _steps(place, lambda passes=passes: passes(batches), streamed)
        place.figure(f"{name}_{group}_differs_by", _apart(found, expected))
        with _attention(place, is_plain=True):
            bits = _steps(place, lambda passes=passes: passes(batches), streamed, 1)
            turned = _steps(place, lambda passes=passes: passes(batches[::-1]), streamed, 1)
        place.run(
            f"{name}, {group} passes at a time", loads=host.book.loads, seconds=found["seconds"], resident_s=expected["seconds"],
            differ=_differ(bits, plain), differ_in_another_order=_differ(turned, plain), of=len(plain["gradients"]),
        )  # fmt: skip
        place.gate(f"{name}_{group}_gradients_equal", not _differ(bits, plain))
        place.gate(f"{name}_{group}_comparison_sees_an_order", _differ(turned, plain) > 0)
        place.figure(f"{name}_{group}_step_over_resident", found["seconds"] / expected["seconds"])
        place.figure(f"{name}_{group}_peak_over_resident", found["peak"] / max(1, expected["peak"]))
        del streamed, host, passes


def _last_resorts(place: Place, files: Any, how: str) -> None:
    """Layers in memory that is not pinned, and on the disk: gradients equal to the bit to those of layers in pinned memory, and the seconds of a step."""
    import torch

    device, dtype = torch.device(place.device), torch.bfloat16 if place.is_card else torch.float32
    batches = [{key: value.to(device) for key, value in batch.items()} for batch in stream.batches_of(4, 64)]
    kinds: dict[str, dict[str, Any]] = {"memory": {}, "pageable": {"pinned": False}, "disk": {"file": place.folder / "layers" / "file"}}
    found = {}
    for name, kind in kinds.items():
        streamed = stream.model(files, host := stream.host_of(device, **kind), how=how, dtype=dtype, device=device)

        def passes(model: Any = streamed, host: Any = host) -> None:
            stream.by_layer(model, host, batches, dtype, 4)

        with _attention(place, is_plain=True):
            found[name] = _steps(place, passes, streamed)
        place.figure(f"{name}_step_s", found[name]["seconds"])
        del streamed, host, passes
    for name in ("pageable", "disk"):
        place.gate(f"{name}_gradients_are_those_of_memory", not _differ(found[name], found["memory"]))


@contextlib.contextmanager
def _attention(place: Place, *, is_plain: bool) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH) if is_plain and place.is_card else contextlib.nullcontext():
        yield


def _differ(found: dict[str, Any], expected: dict[str, Any]) -> int:
    """How many gradients are not the same to the bit."""
    import torch

    return sum(not torch.equal(gradient, found["gradients"][name]) for name, gradient in expected["gradients"].items())


def _apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a gradient, relative to its norm."""
    pairs = ((gradient.double(), found["gradients"][name].double()) for name, gradient in expected["gradients"].items())
    return max(float((one - other).norm() / one.norm().clamp(min=1e-30)) for one, other in pairs)


def _steps(place: Place, passes: Any, model: Any, repeats: int = 4) -> dict[str, Any]:
    import torch

    gc.collect()
    if place.is_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(repeats):
        model.zero_grad()
        if place.is_card:
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        passes()
        if place.is_card:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    peak = torch.cuda.max_memory_allocated() if place.is_card else 0
    return {"seconds": statistics.median(seconds[-3:]), "gradients": gradients, "peak": peak}


def _training(place: Place, files: Any) -> None:
    """The worker itself: the losses of a run with streamed layers are those of one without. Rows are shorter than 256 tokens: fast attention adds up no more
    than two parts of a gradient then, whose order changes nothing."""
    data = material.rows(place.folder / "rows.jsonl", material.lengths(60, 200))
    precision, losses = "bf16" if place.is_card else "fp32", {}
    layers = 6 if place.is_card else 2
    for name, streaming in (("resident", None), ("streamed", {"layers": layers, "group": 3, "places": 2, "host": "memory"})):
        recipe = {"method__kind": "qlora", "train__gradient_checkpointing": True}
        run = divided.train(place, Division(name, recipe=recipe, streaming=streaming), files, data, precision, limit_s=_ENDS_S)
        losses[name] = divided.losses(run)
        place.figure(f"{name}_training_peak_bytes", divided.watched(run, 0)["peak_bytes"])
        material.remove(run, 1)
    place.run("a training", **losses)
    place.gate("a_streamed_training_is_a_resident_one", losses["resident"] == losses["streamed"])


def _small_card(place: Place) -> None:
    """3B in 4 bits with all of its layers on the host, in a part of the card as large as a laptop's: tokens per second beside a resident training."""
    shape = "3B" if place.is_card else "tiny"
    layers = int(material.SHAPES[shape]["num_hidden_layers"])
    files = material.model(place.folder / "3B", shape, device=place.device)
    data = material.rows(place.folder / "long.jsonl", [1000 if place.is_card else 60] * 72)
    recipe = {"method__kind": "qlora", "train__gradient_checkpointing": True, "train__seq_len": 1024}
    rates = {}
    for name, streaming in (("resident", None), ("streamed", {"layers": layers, "group": 6, "places": 2, "host": "memory"})):
        limits = {"PYTORCH_ALLOC_CONF": _budget()} if streaming and place.is_card else {}
        of = Division(f"3B {name}", recipe=recipe, streaming=streaming, environment=limits)
        run = divided.train(place, of, files, data, "bf16" if place.is_card else "fp32", limit_s=2 * _ENDS_S, steps=6)
        lines = ranks.lines(run, 1, 0)[2:]  # kernels are chosen before
        rates[name] = sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines)
        place.figure(f"3B_{name}_tokens_per_s", rates[name])
        place.figure(f"3B_{name}_peak_bytes", divided.watched(run, 0)["peak_bytes"])
        material.remove(run, 1)
    place.figure("3B_streamed_over_resident", rates["streamed"] / rates["resident"])


def _budget() -> str:
    """What lets a process have so much of the card and no more."""
    import torch

    return f"expandable_segments:True,per_process_memory_fraction:{_BUDGET_BYTES / torch.cuda.mem_get_info(0)[1]:.6f}"
