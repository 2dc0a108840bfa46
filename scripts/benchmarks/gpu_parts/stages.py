"""A pipeline on a card: does it end, is its training that of one process, are a stage's seconds its own, and what does a full card do to it?

Stages share one card and meet over NCCL; their messages go as they do between machines. How long a step takes there says nothing.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import divided, material
from benchmarks.gpu_parts.divided import Division
from benchmarks.gpu_parts.place import Place

_ENDS_S = 60.0  # a training that has not ended by then hangs: three steps of a small model
_FP32, _OTHERS = 1e-5, 2e-2
_LATE_S = 0.3
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora, bf16": ("bf16", {"method__kind": "lora"}), "qlora, bf16": ("bf16", {"method__kind": "qlora"}),
    "full, fp32": ("fp32", {"method__kind": "full"}), "checkpointed, fp32": ("fp32", {"method__kind": "lora", "train__gradient_checkpointing": True}),
}  # fmt: skip
# Of the memory that the stages held at their best: with a little less, an allocator gives blocks back in the middle of a step.
_FRACTIONS = (0.85, 0.94, 1.02)


def measure(place: Place) -> None:
    """What nobody has seen on a card first: a much too small card. A training takes half a minute there, and the rest ran to its end on one H200."""
    shape, layers = ("small", 8) if place.is_card else ("tiny", 2)
    model = material.model(place.folder / "model", shape, "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(100, 200))
    precision = "bf16" if place.is_card else "fp32"
    with place.attempt("a full card"):
        _full(place, layers, model, data, precision)
    with place.attempt("own seconds"):
        _own_seconds(place, layers, model, data, precision)
    for name, (of, recipe) in _KINDS.items() if place.is_card else [("full, fp32", _KINDS["full, fp32"])]:
        with place.attempt(f"law, {name}"):
            _agrees(place, name, of, recipe, layers, model, data)
    for count in (2, 3) if layers > 2 else (2,):
        for held_out in (False, True):
            with place.attempt(f"{count} stages{' with held-out rows' if held_out else ''}"):
                _ends(place, count, layers, model, data, precision, held_out=held_out)


def cut(layers: int, count: int) -> tuple[int, ...]:
    """As many layers on each stage, the first ones one more."""
    return tuple(layers // count + (number < layers % count) for number in range(count))


def _ends(place: Place, count: int, layers: int, model: Path, data: Path, precision: str, *, held_out: bool) -> None:
    recipe = {"method__kind": "lora"} | ({"data__eval_fraction": 0.2, "tracking__eval_every_steps": 2} if held_out else {})
    name = f"{count} stages{', held out' if held_out else ''}"
    run = divided.train(place, Division(name, stages=cut(layers, count), recipe=recipe), model, data, precision, limit_s=_ENDS_S)
    place.run(name, losses=divided.losses(run), watched=[divided.watched(run, rank) for rank in range(count)])
    place.gate(f"{count}_stages_end{'_with_held_out_rows' if held_out else ''}", len(divided.losses(run)) == 3)
    material.remove(run, count)


def _agrees(place: Place, name: str, precision: str, recipe: dict[str, object], layers: int, model: Path, data: Path) -> None:
    """Two stages against one process."""
    steps = 6 if place.is_card else 3
    one = divided.train(place, Division(f"one, {name}", recipe=recipe), model, data, precision, limit_s=_ENDS_S, steps=steps)
    two = divided.train(
        place, Division(f"two, {name}", stages=cut(layers, 2), recipe=recipe), model, data, precision, limit_s=_ENDS_S, steps=steps
    )
    expected, found = divided.losses(one), divided.losses(two)
    place.run(f"law, {name}", losses=found, losses_of_one=expected)
    key = name.replace(", ", "_")
    place.figure(f"{key}_loss_apart", divided.apart(found, expected))
    place.gate(f"{key}_losses_agree", divided.apart(found, expected) <= (_FP32 if precision == "fp32" else _OTHERS))
    material.remove(one, 1)
    material.remove(two, 2)


def _own_seconds(place: Place, layers: int, model: Path, data: Path, precision: str) -> None:
    """The last stage is late in every backward pass, then twice as late: the seconds of the first stage's passes must stay as they are."""
    late_s = _LATE_S if place.is_card else 0.02
    own = []
    for times in (1, 2):
        name = f"late {times}"
        of = Division(name, stages=cut(layers, 2), recipe={"method__kind": "lora"}, environment={"BENCH_LATE_S": str(times * late_s)})
        run = divided.train(place, of, model, data, precision, limit_s=_ENDS_S + 40)
        seconds = [divided.watched(run, rank)["passes_s"] for rank in range(2)]
        place.run(f"own seconds, {name}", passes_s=seconds)
        own.append(statistics.median(second for step in seconds[0][1:] for second in step))
        material.remove(run, 2)
    place.figure("late_stage_moves_a_pass", own[1] / own[0] - 1)
    if place.is_card:
        place.gate("passes_are_this_stages_own", abs(own[1] / own[0] - 1) <= 0.03)


def _full(place: Place, layers: int, model: Path, data: Path, precision: str) -> None:
    """A card as small as what the stages held: a training ends, or says that memory is short. It does not hang."""
    of = Division("roomy", stages=cut(layers, 2), recipe={"method__kind": "full"})
    run = divided.train(place, of, model, data, precision, limit_s=_ENDS_S)
    most = max(divided.watched(run, rank)["peak_bytes"] for rank in range(2))
    place.run("a roomy card", held_bytes=most)
    material.remove(run, 2)
    if not place.is_card:
        return
    import torch

    total = torch.cuda.mem_get_info(0)[1]
    for fraction in _FRACTIONS:
        limit = f"expandable_segments:True,per_process_memory_fraction:{fraction * most / total:.6f}"
        small = Division(f"fraction {fraction}", stages=of.stages, recipe=of.recipe, environment={"PYTORCH_ALLOC_CONF": limit})
        words, folder = "", place.folder / f"{precision}, {small.name}"
        try:
            divided.train(place, small, model, data, precision, limit_s=_ENDS_S)
        except RuntimeError as error:
            words = str(error)
        files = [material.folder_of(folder, rank) / "watched.json" for rank in range(2)]
        place.run(f"a card of {fraction} of it", words=words[-1500:], watched=[file.read_text() for file in files if file.exists()])
        place.gate(f"a_card_of_{fraction}_ends", not words or "out of memory" in words.lower())
