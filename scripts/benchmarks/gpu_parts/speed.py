"""Tokens per second of the worker on one card, for the models of the recipes, and what each switch gains; beside TRL through `scripts/bench speed`.

Tokens are those of the rows; padding does not count. The first steps of a run are not counted: kernels are chosen and memory is taken there.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_WARM = 4  # steps
_MODELS = (("3B", "qlora", 2048, 8), ("1.1B", "lora", 1024, 16), ("7B", "qlora", 1024, 8))  # shape, method, longest row, rows per pass
# Switches of the recipe; those of the worker are added where it has some.
_RECIPE: dict[str, dict[str, Any]] = {
    "fused loss off": {"train__fused_loss": False},
    "fused loss on": {"train__fused_loss": True},
    "packed": {"data__packing": True},
    "no checkpointing": {"train__gradient_checkpointing": False},
}


def measure(place: Place) -> None:
    """First what each model does as it is, then beside TRL, then every switch with the two smaller ones."""
    kinds = _MODELS if place.is_card else (("tiny", "lora", 200, 4),)
    best: dict[str, float] = {}
    for shape, kind, longest, rows in kinds:
        if kind == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            place.run(f"{shape} {kind}", problem="bitsandbytes is not installed here")
            continue
        model = material.model(place.folder / shape, shape, device=place.device)
        best[shape] = _rate(place, model, shape, kind, longest, rows, "plain", {}, {})
        _rate(place, model, shape, kind, longest, rows, "profiled", {}, {})
        if kind == "lora":
            _beside_trl(place, model, shape)
        elif shape == "7B":
            shutil.rmtree(model)
    for shape, kind, longest, rows in kinds:
        if shape not in best or shape == "7B":
            continue
        model = place.folder / shape
        for name, recipe in _RECIPE.items():
            place.figure(f"{shape}_{kind}_{_key(name)}_over_plain", _rate(place, model, shape, kind, longest, rows, name, recipe, {}) / best[shape])
        for name in worker_switches():
            without = _rate(place, model, shape, kind, longest, rows, f"without {name}", {}, {name: False})
            place.figure(f"{shape}_{kind}_gain_of_{name}", best[shape] / without)


def worker_switches() -> list[str]:
    """What can be turned off in the worker to see its gain (homelab/worker/switches.py); nothing where it has no switches."""
    if importlib.util.find_spec("homelab.worker.switches") is None:
        return []
    from homelab.worker import switches

    return [field.name for field in dataclasses.fields(switches.Switches)]


def _rate(
    place: Place, model: Path, shape: str, kind: str, longest: int, rows: int, name: str, recipe: dict[str, Any], switches: dict[str, bool]
) -> float:  # fmt: skip
    """Tokens per second of one run of a few steps."""
    steps = 14 if place.is_card else _WARM + 4
    batch = 4 * rows
    data = material.rows(place.folder / "rows.jsonl", material.lengths(batch * steps, longest))
    settings = {
        "method__kind": kind, "train__global_batch": batch, "train__steps": steps, "train__seq_len": longest, "train__gradient_checkpointing": True,
        "train__fused_loss": default_fused_loss(), **recipe,
    }  # fmt: skip
    run = material.run(place.folder / f"{shape} {name}", model, data, **settings)
    precision, backend = ("bf16", "nccl") if place.is_card else ("fp32", "gloo")
    material.plan(run, 1, (batch,), device=place.device, precision=precision, backend=backend, micro_batch=rows, switches=switches)
    is_profiled = name == "profiled"
    started = ranks.worker(run, 1, 1, program=("-m", "benchmarks.gpu_parts.speed_profile") if is_profiled else ("-m", "homelab.worker"))
    well = ranks.wait(started, 150)
    lines = ranks.lines(run, 1, 0)[_WARM:]
    profiled = json.loads((run / "profile.json").read_text()) if well and is_profiled else {}
    shutil.rmtree(run)
    if not well:
        raise RuntimeError(f"{shape} {kind}, {name}: {started[0].words()}")
    rate = sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines)
    place.run(
        f"{shape} {kind}, {name}", tokens_per_s=rate, step_s=statistics.median(line["step_s"] for line in lines), peak_bytes=max(line["memory_bytes"] for line in lines),
        start_to_end_s=started[0].seconds, rows_per_pass=rows, longest=longest, **profiled,
    )  # fmt: skip
    if profiled:
        place.figure(f"{shape}_{kind}_card_idle", 1 - profiled["card_busy_s"] / profiled["profiled_step_s"])
        place.figure(f"{shape}_{kind}_kernels", profiled["kernels"])
        return rate  # the profiler itself takes time
    place.figure(f"{shape}_{kind}_{_key(name)}_tokens_per_s", rate)
    return rate


def default_fused_loss() -> Any:
    """What a recipe that says nothing gets: "auto" where the worker knows it."""
    try:
        from homelab.config.recipe import Train
    except ImportError:
        return False
    return Train.model_fields["fused_loss"].default


def _beside_trl(place: Place, model: Path, shape: str) -> None:
    """`scripts/bench speed` on this model, step by step in turn with TRL."""
    for needed in ("benchmarks.speed", "trl", "rich"):
        if importlib.util.find_spec(needed) is None:
            place.run("beside TRL", problem=f"{needed} is not here")
            return
    file = place.folder / "speed.json"
    environment = {"HOMELAB_MODEL": str(model), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    program = ["-m", "benchmarks.speed", "--json", str(file), "--repeats", "12" if place.is_card else "2", *([] if place.is_card else ["--cpu"])]
    started = [ranks.start(program, place.folder / "speed.txt", environment)]
    if not ranks.wait(started, 200):
        place.run("beside TRL", problem=started[0].words())
        return
    document = json.loads(file.read_text())
    place.run("beside TRL", **document)
    for name, value in document["figures"].items():
        place.figure(f"{shape}_lora_{name}", value)
    if place.is_card:
        place.gate("at_least_as_fast_as_trl", document["figures"]["tokens_per_s_over_trl"] >= 1.0)


def _key(name: str) -> str:
    return name.replace(" ", "_")
