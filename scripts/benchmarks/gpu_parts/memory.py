"""Memory of a step on a card, measured against the prediction: formulas, dry run, context, gaps of the allocator, the second gradient."""

from __future__ import annotations

import importlib.util
import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_SIDE_BY_SIDE = 4  # processes do not change each other's allocations
_CONTEXT_BYTES = 2**29  # about; beside what a process allocates


def measure(place: Place) -> None:
    """The parts of the estimate, one after the other."""
    with place.attempt("context"):
        _context(place)
    shape = "1.1B" if place.is_card else "tiny"
    model = material.model(place.folder / "model", shape, device=place.device)
    with place.attempt("situations"):
        _situations(place, model, material.SHAPES[shape])
    for name, variables in {"as it is": {}, "expandable": ranks.ALLOCATOR_OF_RUNS}.items():
        with place.attempt(f"gaps, {name}"):
            _gaps(place, model, name, variables)
    with place.attempt("full training, two ranks"):
        _second_gradient(place)


@dataclass(frozen=True)
class _Step:
    """A real step that runs: its situation, what was said of it, and its process."""

    run: dict[str, Any]
    said: dict[str, int]
    rank: ranks.Rank


def _context(place: Place) -> None:
    """Bytes that a process takes of the card with one number on it."""
    if not place.is_card:
        return
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info(0)[0]
    started = ranks.start(
        ["-c", "import time, torch; torch.zeros(1, device='cuda'); print('here', flush=True); time.sleep(60)"], place.folder / "context.txt"
    )
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
    from benchmarks.memory import foretold, situation

    grid = (
        itertools.product(kinds, (True, False), (True, False), ((512, 1), (1024, 4))) if place.is_card else [("lora", True, False, (64, 2))]
    )
    runs = [situation("model", kind, "bf16", place.device, *size, checkpointing, fused) for kind, checkpointing, fused, size in grid]
    free_bytes = _free_bytes() if place.is_card else 0
    errors, dry_errors = [], []
    running: deque[_Step] = deque()

    def hear() -> None:
        """How the step ended that began first."""
        step = running.popleft()
        with place.attempt(_title(step.run)):
            ranks.checked([step.rank], 120)
            real = _measured(step.rank) if place.is_card else {}
            place.run(_title(step.run), **step.run, **step.said, real=real)
            if real:
                errors.append(100 * (step.said["predicted_bytes"] / real["reserved_bytes"] - 1))
                dry_errors.append(100 * (step.said["dry_run_bytes"] / real["allocated_bytes"] - 1))

    for number, run in enumerate(runs):
        with place.attempt(_title(run)):
            prediction = foretold(shape, run)
            while must_wait([step.said["predicted_bytes"] for step in running], prediction["predicted_bytes"], free_bytes):
                hear()
            running.append(_Step(run, prediction, _start(place, model, run, number)))
    while running:
        hear()
    if errors:
        place.figure("predicted_over_reserved_median_percent", statistics.median(errors))
        place.figure("predicted_over_reserved_worst_percent", max(errors, key=abs))
        place.figure("dry_run_over_allocated_worst_percent", max(dry_errors, key=abs))


def must_wait(running: Sequence[int], predicted: int, free_bytes: int) -> bool:
    """Whether a step that takes `predicted` bytes has to wait for one of those that run, which take so many each, on a card with so many free."""
    taken = sum(size + _CONTEXT_BYTES for size in (*running, predicted))
    return bool(running) and (len(running) >= _SIDE_BY_SIDE or taken > free_bytes)


def _title(run: dict[str, Any]) -> str:
    train = run["train"]
    used = [name for name in ("gradient_checkpointing", "fused_loss") if train[name]]
    return f"{run['method']['kind']}, {run['micro_batch']} x {train['seq_len']}{''.join(f', {name}' for name in used)}"


def _start(place: Place, model: Path, run: dict[str, Any], number: int) -> ranks.Rank:
    """The real step is that of `scripts/bench memory`, with the allocator of real runs. On the CPU it is only seen that a process begins and ends."""
    text = f"from benchmarks import memory; memory.one_on_cuda({str(model)!r}, {run!r})" if place.is_card else "print('here')"
    return ranks.start(["-c", text], place.folder / f"step-{number}.txt", ranks.ALLOCATOR_OF_RUNS)


def _measured(rank: ranks.Rank) -> dict[str, int]:
    names = ("reserved_bytes", "allocated_bytes", "process_bytes")
    return dict(zip(names, map(int, rank.last_line(r"\d+ \d+ \d+").split()), strict=True))


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def _gaps(place: Place, model: Path, name: str, variables: Mapping[str, str]) -> None:
    """Reserved over allocated after 60 steps of changing lengths on a card of 7.4 GiB."""
    started = ranks.start(
        ["-m", "benchmarks.gpu_parts.memory_gaps", place.device, str(model)], place.folder / f"gaps {name}.txt", variables
    )
    ranks.checked([started], 100)
    measured = json.loads(started.last_line(r"\{.*\}"))
    place.run(f"gaps, {name}", **measured)
    place.figure(f"reserved_over_allocated_{name.replace(' ', '_')}", measured["reserved_bytes"] / max(measured["allocated_bytes"], 1))


def _second_gradient(place: Place) -> None:
    """Full training on two ranks: bytes per weight that a step of three passes takes beyond a step of one."""
    model = material.model(place.folder / "full", "small" if place.is_card else "tiny", "float32", place.device)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4
    peaks = {}
    for passes in (1, 3):
        run = second_gradient_run(place.folder, model, passes, place.device)
        ranks.checked(ranks.worker(run, 1, 2), 100)
        peaks[passes] = ranks.lines(run, 1, 0)[-1]["memory_bytes"]
        material.remove(run, 2)
    place.run("full training, two ranks", peak_bytes=peaks, weights=weights)
    place.figure("second_gradient_bytes_per_weight", (peaks[3] - peaks[1]) / weights)


def second_gradient_run(folder: Path, model: Path, passes: int, device: str) -> Path:
    """Three steps on two ranks, each of `passes` equal passes: the recipe counts their rows, or a pass would hold what memory does."""
    rows_per_pass, steps = 2, 3
    share = rows_per_pass * passes
    data = material.rows(folder / f"rows-{passes}.jsonl", [128] * 2 * share * steps)
    run = material.run(
        folder / f"{passes} passes", model, data, train__global_batch=2 * share, train__steps=steps, parallel__micro_batch=rows_per_pass
    )
    precision = "bf16" if device == "cuda" else "fp32"
    material.plan(run, 1, (share, share), device=device, precision=precision, micro_batch=rows_per_pass)
    return run
