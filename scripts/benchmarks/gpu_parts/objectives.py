"""Learning from pairs and labels on a card: its losses in fp32 are those of a CPU, and in bf16 near them. All trainings of a kind run side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from benchmarks.gpu_parts import divided, material, ranks
from benchmarks.gpu_parts.place import Place

from homelab.shared.recipe.objective import ObjectiveKind

_FP32, _BF16 = 1e-4, 5e-2
_STEPS, _ENDS_S = 3, 150.0
_ROWS = 12 * _STEPS
# A KTO or DPO loss begins at a number that no weight moves: the norm of the gradient tells more.
_COMPARED = ("loss", "grad_norm")


def measure(place: Place) -> None:
    """Each objective with a base of 16 or 32 bits, then with one of 4 bits, whose codes come from the device: its losses are told alone."""
    model = material.model(place.folder / "model", "small" if place.is_card else "tiny", "float32", place.device)
    files = {kind: _rows(place.folder / f"{kind}.jsonl", kind) for kind in get_args(ObjectiveKind)}
    devices = {"cpu": ("cpu", "fp32"), "fp32": (place.device, "fp32"), "bf16": ("cuda", "bf16")}
    if not place.is_card:
        devices = {"cpu": ("cpu", "fp32"), "fp32": ("cpu", "fp32")}
        files = {kind: files[kind] for kind in ("dpo", "kto")}
    for method in ("lora", "qlora") if place.is_card else ("lora",):
        found = _trained(place, method, model, files, devices)
        for kind in files:
            with place.attempt(f"{kind}, {method}"):
                _compare(place, f"{kind}_{method}", {name: found[name, kind] for name in devices if (name, kind) in found})


def _trained(
    place: Place, method: str, model: Path, files: dict[str, Path], devices: dict[str, tuple[str, str]]
) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """What each training that ended well tells of its steps, by the name of the device and the objective."""
    started: dict[tuple[str, str], tuple[Path, list[ranks.Rank]]] = {}
    for name, (device, precision) in devices.items():
        if method == "qlora" and name == "cpu":
            continue
        for kind, data in files.items():
            run = material.run(
                place.folder / f"{name}, {kind}, {method}", model, data, objective__kind=kind, method__kind=method, train__steps=_STEPS,
                train__precision=precision, parallel__micro_batch=2, data__format="labelled" if kind == "kto" else "preference",
            )  # fmt: skip
            material.plan(run, 1, (12,), device=device, precision=precision)
            # A rank of the CPU must not take the card.
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if place.is_card and device == "cpu" else ranks.ALLOCATOR_OF_RUNS
            started[name, kind] = run, ranks.worker(run, 1, 1, hidden)
    found = {}
    for (name, kind), (run, rank) in started.items():
        with place.attempt(f"{kind}, {method}, {name}"):
            ranks.checked(rank, _ENDS_S)
            lines = ranks.lines(run, 1, 0)
            found[name, kind] = {key: {line["step"]: line[key] for line in lines} for key in _COMPARED}
            material.remove(run, 1)
    return found


def _compare(place: Place, key: str, found: dict[str, dict[str, dict[int, float]]]) -> None:
    place.run(key, **found)
    if "fp32" not in found:
        return
    for name, other, most in (("cpu", "fp32", _FP32), ("fp32", "bf16", _BF16)):
        if name in found and other in found:
            away = max(divided.apart(found[other][compared], found[name][compared]) for compared in _COMPARED)
            place.figure(f"{key}_{other}_from_{name}", away)
            place.gate(f"{key}_{other}_is_{name}", away <= most)


def _rows(file: Path, kind: str) -> Path:
    """The rows of `material.rows`, of two of which one makes a pair."""
    plain = [json.loads(line) for line in material.rows(file, material.lengths(2 * _ROWS, 150)).read_text(encoding="utf-8").splitlines()]
    with file.open("w", encoding="utf-8") as stream:
        for place, (better, worse) in enumerate(zip(plain[::2], plain[1::2], strict=True)):
            pair: dict[str, Any] = {"prompt": better["prompt"], "chosen": better["completion"], "rejected": worse["completion"]}
            labelled = {**better, "label": place % 3 != 1}
            stream.write(json.dumps(labelled if kind == "kto" else pair) + "\n")
    return file
