"""The law on a card: how far losses and weights are apart when the same batches are divided otherwise.

Everything is held against the same run done twice on one rank: what differs there is the card's own noise (atomic sums, other kernels for
other shapes). Ranks share the card and talk over gloo: only who computes what differs.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_SIDE_BY_SIDE = 4  # runs at once: most of their time is importing
_FLOOR = 1e-6  # relative: fp32 rounds a loss to about 1e-7, and two divisions add up in another order
_NOISE = 3.0


@dataclass(frozen=True)
class Case:
    """One way to train the same recipe. `like` is the case that it is compared with."""

    name: str
    shares: tuple[int, ...] = (12,)
    micro_batch: int = 4
    like: str = "one"
    recipe: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("one"),
    Case("again"),
    Case("8+4", (8, 4)),
    Case("7+4+1", (7, 4, 1)),
    Case("passes of 1", micro_batch=1),
    Case("7+4+1, passes of 2", (7, 4, 1), 2),
    Case("checkpointing", (8, 4), recipe={"train__gradient_checkpointing": True}),
    Case("fused loss", (8, 4), recipe={"train__fused_loss": True}),
    Case("packed", recipe={"data__packing": True}, like="packed"),
    Case("packed, 8+4", (8, 4), like="packed", recipe={"data__packing": True}),
)
_FEW = ("one", "again", "8+4", "7+4+1", "7+4+1, passes of 2")
_OF = {"fp32": tuple(case.name for case in CASES), "bf16": _FEW, "fp16": _FEW}


def measure(place: Place) -> None:
    """All cases of all precisions; the gate is fp32's."""
    steps, shape = (30, "small") if place.is_card else (2, "tiny")
    model = material.model(place.folder / "model", shape, "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * steps, 250))
    for precision, names in _OF.items() if place.is_card else [("fp32", ("one", "again", "8+4"))]:
        cases = [case for case in CASES if case.name in names]
        done: dict[str, dict[str, Any]] = {}
        for first in range(0, len(cases), _SIDE_BY_SIDE):
            some = cases[first : first + _SIDE_BY_SIDE]
            started = [(case, *_start(place, model, data, steps, precision, case)) for case in some]
            for case, run, processes in started:
                ranks.checked(processes, 200)
                done[case.name] = _result(run, len(case.shares), steps)
                shutil.rmtree(run / "final", ignore_errors=True)
        _compare(place, precision, cases, done)


def _start(place: Place, model: Path, data: Path, steps: int, precision: str, case: Case) -> tuple[Path, list[ranks.Rank]]:
    recipe = {"train__steps": steps, "train__precision": precision, "checkpoint__every_steps": steps, **case.recipe}
    run = material.run(place.folder / f"{precision}, {case.name}", model, data, **recipe)
    material.plan(run, 1, case.shares, device=place.device, precision=precision, micro_batch=case.micro_batch)
    return run, ranks.worker(run, 1, len(case.shares))


def _result(run: Path, size: int, steps: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    lines = ranks.lines(run, 1, 0)
    assert len(lines) == steps, f"{run.name}: {len(lines)} of {steps} steps"
    weights = load_file(str(run / "checkpoints" / f"step-{steps:08d}" / "trainable.safetensors"))
    return {
        "losses": [line["loss"] for line in lines],
        "skipped": [line["step"] for line in lines if line["grad_norm"] is None],
        "weights": {name: tensor.double() for name, tensor in weights.items()},
        "seconds": sum(line["step_s"] for line in lines),
        "samples": sorted(sum(line["samples"] for line in ranks.lines(run, 1, rank)) for rank in range(size)),
    }


def _compare(place: Place, precision: str, cases: list[Case], done: dict[str, dict[str, Any]]) -> None:
    apart: dict[str, tuple[float, float]] = {}
    for case in cases:
        if case.name == case.like:
            continue
        found, expected = done[case.name], done[case.like]
        loss = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], expected["losses"], strict=True))
        weight = _weights_apart(found["weights"], expected["weights"])
        apart[case.name] = loss, weight
        place.run(
            case.name, precision=precision, loss_apart=loss, weights_apart=weight, skipped=found["skipped"], skipped_by_one=expected["skipped"],
            samples=found["samples"], seconds=found["seconds"],
        )  # fmt: skip
    noise = apart.pop("again")
    for name, index in (("loss", 0), ("weights", 1)):
        place.figure(f"{precision}_{name}_noise", noise[index])
        place.figure(f"{precision}_{name}_apart", max(pair[index] for pair in apart.values()))
    if precision == "fp32":
        place.gate("fp32_losses_agree", max(pair[0] for pair in apart.values()) <= max(_NOISE * noise[0], _FLOOR * 10))
    if precision == "fp16":
        alike = all(done[case.name]["skipped"] == done[case.like]["skipped"] for case in cases)
        place.gate("fp16_skips_the_same_steps", alike)


def _weights_apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """|found - expected| / |expected| of all tensors as one vector."""
    apart = sum(float((found[name] - expected[name]).norm()) ** 2 for name in expected)
    return float((apart / sum(float(tensor.norm()) ** 2 for tensor in expected.values())) ** 0.5)
