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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_WARM = 4  # steps


@dataclass(frozen=True)
class Kind:
    """What is trained: a shape of `material`, the method, tokens of the longest row, rows per pass."""

    shape: str
    method: str
    longest: int
    rows: int

    @property
    def name(self) -> str:
        """As it is told."""
        return f"{self.shape} {self.method}"

    @property
    def batch(self) -> int:
        """Rows of a step: several passes."""
        return 4 * self.rows


MODELS = (Kind("3B", "qlora", 2048, 8), Kind("1.1B", "lora", 1024, 16), Kind("7B", "qlora", 1024, 8))
# Switches of the recipe; those of the worker are added where it has some.
RECIPES: dict[str, dict[str, Any]] = {
    "fused loss off": {"train__fused_loss": False},
    "fused loss on": {"train__fused_loss": True},
    # A packed row is as long as the longest one: a few of them are about as many tokens as a plain batch.
    "packed": {"data__packing": True, "train__global_batch": 4, "parallel__micro_batch": 1},
    "no checkpointing": {"train__gradient_checkpointing": False},
}


def measure(place: Place) -> None:
    """First what each model does as it is, then beside TRL, then every switch with the two smaller ones."""
    plain: dict[Kind, float] = {}
    for kind in MODELS if place.is_card else (Kind("tiny", "lora", 200, 4),):
        if kind.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
            place.run(kind.name, problem="bitsandbytes is not installed here")
            continue
        with place.attempt(kind.name):
            material.model(place.folder / kind.shape, kind.shape, device=place.device)
            plain[kind] = _rate(place, kind, "plain")
        with place.attempt(f"{kind.name}, profiled"):
            _rate(place, kind, "profiled")
        if kind.method == "lora":
            with place.attempt("beside TRL"):
                _beside_trl(place, kind)
        elif kind.shape == "7B":
            shutil.rmtree(place.folder / kind.shape, ignore_errors=True)
    for kind, rate in plain.items():
        if kind.shape == "7B":
            continue
        for name, recipe in RECIPES.items():
            with place.attempt(f"{kind.name}, {name}"):
                place.figure(f"{_key(kind.name)}_{_key(name)}_over_plain", _rate(place, kind, name, recipe) / rate)
        for name in worker_switches():
            with place.attempt(f"{kind.name}, without {name}"):
                place.figure(f"{_key(kind.name)}_gain_of_{name}", rate / _rate(place, kind, f"without {name}", switches={name: False}))


def worker_switches() -> list[str]:
    """What can be turned off in the worker to see its gain (homelab/worker/runtime/switches.py); nothing where it has no switches."""
    if importlib.util.find_spec("homelab.worker.runtime.switches") is None:
        return []
    from homelab.worker.runtime import switches

    return [field.name for field in dataclasses.fields(switches.Switches)]


def _rate(place: Place, kind: Kind, name: str, recipe: Mapping[str, Any] | None = None, switches: dict[str, bool] | None = None) -> float:
    """Tokens per second of one run of a few steps."""
    run = prepare(place, kind, name, recipe or {}, switches or {})
    is_profiled = name == "profiled"
    started = ranks.worker(run, 1, 1, program=("-m", "benchmarks.gpu_parts.speed_profile") if is_profiled else ("-m", "homelab.worker"))
    ranks.checked(started, 150)
    lines = ranks.lines(run, 1, 0)[_WARM:]
    profiled = json.loads((run / "profile.json").read_text()) if is_profiled else {}
    material.remove(run, 1)
    rate = sum(line["tokens"] for line in lines) / sum(line["step_s"] for line in lines)
    place.run(
        f"{kind.name}, {name}", tokens_per_s=rate, step_s=statistics.median(line["step_s"] for line in lines),
        peak_bytes=max(line["memory_bytes"] for line in lines), start_to_end_s=started[0].seconds, longest=kind.longest,
        rows_per_pass=(recipe or {}).get("parallel__micro_batch", kind.rows), **profiled,
    )  # fmt: skip
    if profiled:  # its rate is none: the profiler itself takes time
        place.figure(f"{_key(kind.name)}_card_idle", 1 - profiled["card_busy_s"] / profiled["profiled_step_s"])
        place.figure(f"{_key(kind.name)}_kernels", profiled["kernels"])
    else:
        place.figure(f"{_key(kind.name)}_{_key(name)}_tokens_per_s", rate)
    return rate


def prepare(place: Place, kind: Kind, name: str, recipe: Mapping[str, Any], switches: dict[str, bool]) -> Path:
    """The run folder of one rank, with its plan and its rows."""
    steps = 14 if place.is_card else _WARM + 4
    data = material.rows(place.folder / "rows.jsonl", material.lengths(kind.batch * steps, kind.longest))
    # A number of rows in the recipe, or a pass takes whatever memory holds: here all rows of a step, and nothing would be copied ahead.
    settings: dict[str, Any] = {
        "method__kind": kind.method, "train__global_batch": kind.batch, "train__steps": steps, "train__seq_len": kind.longest,
        "train__gradient_checkpointing": True, "train__fused_loss": default_fused_loss(), "parallel__micro_batch": kind.rows, **recipe,
    }  # fmt: skip
    # Two folders deep: beside them the worker keeps the quantised bases.
    run = material.run(place.folder / "runs" / f"{kind.shape} {name}", place.folder / kind.shape, data, **settings)
    material.plan(
        run, 1, (settings["train__global_batch"],), device=place.device, precision="bf16" if place.is_card else "fp32",
        backend="nccl" if place.is_card else "gloo", micro_batch=settings["parallel__micro_batch"], switches=switches,
    )  # fmt: skip
    return run


def default_fused_loss() -> Any:
    """What a recipe that says nothing gets, also where the recipe's own module cannot be imported."""
    try:
        from homelab.shared.recipe import Train
    except ImportError:
        return "auto"
    return Train.fused_loss


def _beside_trl(place: Place, kind: Kind) -> None:
    """`scripts/bench speed` on this model, step by step in turn with TRL."""
    for needed in ("benchmarks.speed", "trl", "rich"):
        if importlib.util.find_spec(needed) is None:
            place.run("beside TRL", problem=f"{needed} is not here")
            return
    file = place.folder / "speed.json"
    environment = {"HOMELAB_MODEL": str(place.folder / kind.shape), "OMP_NUM_THREADS": str(os.cpu_count() or 1)}
    program = [
        "-m",
        "benchmarks.speed",
        "--json",
        str(file),
        "--repeats",
        "12" if place.is_card else "2",
        *([] if place.is_card else ["--cpu"]),
    ]
    ranks.checked([ranks.start(program, place.folder / "speed.txt", environment)], 200)
    document = json.loads(file.read_text())
    place.run("beside TRL", **document)
    for name, value in document["figures"].items():
        place.figure(f"{_key(kind.name)}_{name}", value)
    if place.is_card:
        place.gate("at_least_as_fast_as_trl", document["figures"]["tokens_per_s_over_trl"] >= 1.0)


def _key(name: str) -> str:
    return name.replace(" ", "_")
