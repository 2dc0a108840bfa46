"""The law on a card: how far losses and weights are apart when the same batches are divided otherwise.

Everything is held against the same run done twice on one rank: what differs there is the card's own noise (atomic sums, other kernels for
other shapes). Ranks share the card and talk over gloo: only who computes what differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_SIDE_BY_SIDE = 4  # runs at the same time: they spend most of it on imports
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
    switches: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Apart:
    """How far a case is from the one that it is like: the largest difference of a step's loss and that of the weights, both relative."""

    loss: float
    weights: float
    skips_the_same: bool


_LORA = {"method__kind": "lora"}
CASES = (
    Case("one"),
    Case("again"),
    Case("8+4", (8, 4)),
    Case("7+4+1", (7, 4, 1)),
    Case("padded", switches={"joined_rows": False}),
    Case("lora", like="lora", recipe=_LORA),
    # Its head is frozen, so this makes the gradient in the forward pass, in fp16 by a scale of its own.
    Case("lora, fused loss", like="lora", recipe=_LORA | {"train__fused_loss": True}),
    Case("7+4+1, passes of 2", (7, 4, 1), 2),
    Case("passes of 1", micro_batch=1),
    Case("checkpointing", (8, 4), recipe={"train__gradient_checkpointing": True}),
    Case("fused loss", (8, 4), recipe={"train__fused_loss": True}),
    Case("packed", recipe={"data__packing": True}, like="packed"),
    Case("packed, 8+4", (8, 4), like="packed", recipe={"data__packing": True}),
)
_FEW = ("one", "again", "8+4", "7+4+1", "padded", "lora", "lora, fused loss", "7+4+1, passes of 2")
_OF = {"fp32": tuple(case.name for case in CASES), "bf16": _FEW, "fp16": _FEW}


def measure(place: Place) -> None:
    """All cases of all precisions; the gate is fp32's."""
    with place.attempt("attention"):
        _tell_of_the_kernel(place)
    steps, shape = (30, "small") if place.is_card else (2, "tiny")
    model = material.model(place.folder / "model", shape, "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * steps, 250))
    few_on_cpu = ("one", "again", "8+4", "padded", "lora", "lora, fused loss")
    for precision, names in _OF.items() if place.is_card else [("fp32", few_on_cpu)]:
        cases = [case for case in CASES if case.name in names]
        done: dict[str, dict[str, Any]] = {}
        apart: dict[str, Apart] = {}
        for first in range(0, len(cases), _SIDE_BY_SIDE):
            group = cases[first : first + _SIDE_BY_SIDE]
            done |= _train(place, model, data, steps, precision, group)
            for case in group:
                if case.name != case.like and {case.name, case.like} <= done.keys():
                    apart[case.name] = _compare(place, precision, case.name, done[case.name], done[case.like])
            _judge(place, precision, apart)  # after every group, because the next one may exceed the part's limit


def _tell_of_the_kernel(place: Place) -> None:
    """Whether joined rows are one kernel here, or torch's attention row by row: older releases of torch have no such kernel."""
    import torch

    from homelab.worker.model import packed_attention

    heads = torch.empty((1, 8, 1, 64), dtype=torch.bfloat16, device=place.device)
    place.run("attention", one_kernel=packed_attention.is_one_kernel(heads, heads))


def _train(place: Place, model: Path, data: Path, steps: int, precision: str, group: list[Case]) -> dict[str, dict[str, Any]]:
    """The results, by name, of those that ran; all of a group train at once."""
    started: list[tuple[Case, Path, list[ranks.Rank]]] = []
    for case in group:
        with place.attempt(f"{precision}, {case.name}"):
            started.append((case, *_start(place, model, data, steps, precision, case)))
    results = {}
    for case, run, processes in started:
        with place.attempt(f"{precision}, {case.name}"):
            ranks.checked(processes, 100)
            results[case.name] = _result(run, len(case.shares), steps)
            material.remove(run, len(case.shares))
    return results


def _start(place: Place, model: Path, data: Path, steps: int, precision: str, case: Case) -> tuple[Path, list[ranks.Rank]]:
    recipe = {
        "train__steps": steps, "train__precision": precision, "checkpoint__every_steps": steps, "parallel__micro_batch": case.micro_batch, **case.recipe,
    }  # fmt: skip
    run = material.run(place.folder / f"{precision}, {case.name}", model, data, **recipe)
    material.plan(run, 1, case.shares, device=place.device, precision=precision, micro_batch=case.micro_batch, switches=case.switches)
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


def _compare(place: Place, precision: str, name: str, ours: dict[str, Any], expected: dict[str, Any]) -> Apart:
    apart = Apart(
        max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], expected["losses"], strict=True)),
        _weights_apart(ours["weights"], expected["weights"]),
        ours["skipped"] == expected["skipped"],
    )
    place.run(
        name, precision=precision, loss_apart=apart.loss, weights_apart=apart.weights, skipped=ours["skipped"],
        skipped_by_one=expected["skipped"], samples=ours["samples"], seconds=ours["seconds"],
    )  # fmt: skip
    return apart


def _judge(place: Place, precision: str, apart: dict[str, Apart]) -> None:
    """Figures and gates of all that was compared so far."""
    if precision == "fp16" and apart:
        place.gate("fp16_skips_the_same_steps", all(case.skips_the_same for case in apart.values()))
    noise, others = apart.get("again"), [case for name, case in apart.items() if name != "again"]
    if noise is None or not others:
        return
    loss = max(case.loss for case in others)
    place.figure(f"{precision}_loss_noise", noise.loss)
    place.figure(f"{precision}_loss_apart", loss)
    place.figure(f"{precision}_weights_noise", noise.weights)
    place.figure(f"{precision}_weights_apart", max(case.weights for case in others))
    if precision == "fp32":
        place.gate("fp32_losses_agree", loss <= max(_NOISE * noise.loss, _FLOOR * 10))


def _weights_apart(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """|found - expected| / |expected| of all tensors as one vector."""
    apart = sum(float((found[name] - expected[name]).norm()) ** 2 for name in expected)
    return float((apart / sum(float(tensor.norm()) ** 2 for tensor in expected.values())) ** 0.5)
