"""What a step takes of a card against what is said before: formulas, dry run, context, gaps of the allocator, the second gradient."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_SIDE_BY_SIDE = 4  # what each allocates is its own affair


def measure(place: Place) -> None:
    """The parts of the estimate, one after the other."""
    _context(place)
    shape = "1.1B" if place.is_card else "tiny"
    model = material.model(place.folder / "model", shape, device=place.device)
    _situations(place, model, material.SHAPES[shape])
    _gaps(place, model)
    _second_gradient(place)


def _context(place: Place) -> None:
    """Bytes that a process takes of the card with one number on it."""
    if not place.is_card:
        return
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(0)[0]
    started = ranks.start(["-c", "import time, torch; torch.zeros(1, device='cuda'); print('here', flush=True); time.sleep(60)"], place.folder / "context.txt")
    deadline = time.monotonic() + 50
    while "here" not in started.words() and time.monotonic() < deadline:
        time.sleep(0.1)
    held = before - torch.cuda.mem_get_info(0)[0]
    ranks.wait([started], 0)
    place.run("context", bytes=held)
    place.figure("context_bytes", held)


def _situations(place: Place, model: Path, shape: dict[str, Any]) -> None:
    """Method x rows x length x checkpointing x loss: real steps, each in a process of its own, against the dry run and the formulas."""
    if importlib.util.find_spec("rich") is None or importlib.util.find_spec("pydantic") is None:
        place.run("situations", problem="rich and pydantic are not installed here: `scripts/bench memory` needs them")
        return
    kinds = ("lora", "full") if importlib.util.find_spec("bitsandbytes") is None else ("lora", "qlora", "full")
    grid = itertools.product(kinds, (True, False), (True, False), ((512, 1), (1024, 4)))
    runs = [_situation(place, *one) for one in grid] if place.is_card else [_situation(place, "lora", True, False, (64, 2))]
    errors, dry_errors = [], []
    for first in range(0, len(runs), _SIDE_BY_SIDE):
        some = runs[first : first + _SIDE_BY_SIDE]
        started = [_step(place, model, run, number) for number, run in enumerate(some, first)]
        for run, rank in zip(some, started, strict=True):
            said = _said(shape, run)
            if not ranks.wait([rank], 120):
                place.run("situation", **run, **said, problem=rank.words(600))
                continue
            real = [int(word) for word in rank.words().split()[-3:]] if place.is_card else []
            if real:
                errors.append(100 * (said["predicted_bytes"] / real[0] - 1))
                dry_errors.append(100 * (said["dry_run_bytes"] / real[1] - 1))
            place.run("situation", **run, **said, real=dict(zip(("reserved_bytes", "allocated_bytes", "process_bytes"), real, strict=False)))
    if errors:
        place.figure("predicted_over_reserved_median_percent", statistics.median(errors))
        place.figure("predicted_over_reserved_worst_percent", max(errors, key=abs))
        place.figure("dry_run_over_allocated_worst_percent", max(dry_errors, key=abs))


def _situation(place: Place, kind: str, checkpointing: bool, fused: bool, size: tuple[int, int]) -> dict[str, Any]:
    return {
        "method": {"kind": kind, "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear", "backend": "auto"},
        "train": {"seq_len": size[0], "gradient_checkpointing": checkpointing, "fused_loss": fused, "optimizer": "adamw", "seed": 1},
        "precision": "bf16", "device": place.device, "micro_batch": size[1], "model": "model",
    }  # fmt: skip


def _step(place: Place, model: Path, run: dict[str, Any], number: int) -> ranks.Rank:
    """The real step is that of `scripts/bench memory`. On the CPU it is only seen that a process begins and ends."""
    text = f"from benchmarks import memory; memory.one_on_cuda({str(model)!r}, {run!r})" if place.is_card else "print('here')"
    return ranks.start(["-c", text], place.folder / f"step-{number}.txt")


def _said(shape: dict[str, Any], run: dict[str, Any]) -> dict[str, int]:
    """Bytes that the dry run says, and with what the plan adds for the allocator."""
    from homelab.config.recipe import Method, Train
    from homelab.planning import memory
    from homelab.planning.architecture import from_config
    from homelab.worker.dryrun import dry_run

    known = {key: run[key] for key in ("device", "precision", "micro_batch")}
    dry = dry_run(shape, run["method"], run["train"], **known, masked=run["micro_batch"] > 1)["peak_bytes"]
    train = Train(global_batch=64, steps=1, learning_rate=1e-3, **{key: value for key, value in run["train"].items() if key != "seed"})
    built = from_config(shape)
    assert built is not None
    items = memory.estimate(built, Method(kind=run["method"]["kind"], rank=run["method"]["rank"]), train, **known, world_size=1)
    return {"dry_run_bytes": dry, "predicted_bytes": dry + sum(item.size_bytes for item in items if item.name == memory.ALLOCATOR)}


def _gaps(place: Place, model: Path) -> None:
    """Reserved over allocated after 60 steps of changing lengths on a card of 7.4 GiB, with and without segments that grow."""
    for name, variables in {"as it is": {}, "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}.items():
        started = ranks.start(["-m", "benchmarks.gpu_parts.memory_gaps", place.device, str(model)], place.folder / f"gaps {name}.txt", variables)
        if not ranks.wait([started], 100):
            place.run(f"gaps, {name}", problem=started.words(800))
            continue
        found = json.loads(started.words().splitlines()[-1])
        place.run(f"gaps, {name}", **found)
        place.figure(f"reserved_over_allocated_{name.replace(' ', '_')}", found["reserved_bytes"] / max(found["allocated_bytes"], 1))


def _second_gradient(place: Place) -> None:
    """Full training on two ranks: bytes per weight that a step of three passes takes beyond a step of one."""
    model = material.model(place.folder / "full", "small" if place.is_card else "tiny", "float32", place.device)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4
    peaks = {}
    for passes in (1, 3):
        data = material.rows(place.folder / f"rows-{passes}.jsonl", [128] * 4 * passes * 3)
        run = material.run(place.folder / f"{passes} passes", model, data, train__global_batch=4 * passes, train__steps=3)
        material.plan(run, 1, (2 * passes,) * 2, device=place.device, precision="bf16" if place.is_card else "fp32", micro_batch=2)
        ranks.checked(ranks.worker(run, 1, 2), 100)
        peaks[passes] = ranks.lines(run, 1, 0)[-1]["memory_bytes"]
    place.run("full training, two ranks", peak_bytes=peaks, weights=weights)
    place.figure("second_gradient_bytes_per_weight", (peaks[3] - peaks[1]) / weights)
