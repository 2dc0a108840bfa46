"""ddp, zero2, zero3 and fsdp on the same three practice nodes and the same recipe, over cables of 100 Mbit/s; and the memory that each holds.

zero2_step_over_ddp_100mbit  seconds of a step of zero2 over those of ddp, the median over rounds in which all strategies have their turn
held_worst_error_percent     the plan's bytes of the rank that holds most against those measured, storage by storage, over full and lora,
                             bf16 and fp32, ddp, zero2 and zero3 (three ranks, a Llama of 55 million weights; without the process itself)
wire_worst_error_percent     the plan's bytes of a step against those counted at the switch, over all strategies

A step is full training in bf16 of a small random Llama, two passes per rank. Bytes are those of the fullest cable, in the direction that has more.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.faults.ground import SeenRun
from benchmarks.shards import held
from benchmarks.start import Cables

from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice import tiny_model
from scripts.practice.desk import Desk

_STRATEGIES = ("ddp", "zero2", "zero3", "fsdp")
_RATE = "100mbit"
_FIRST, _LAST = 2, 7  # the steps between whose ends is measured: DDP orders its buckets in the second
_LIMIT_S = 300.0
_RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "full"
[train]
global_batch = 6
steps = {steps}
learning_rate = 1e-4
seq_len = 64
precision = "bf16"
gradient_checkpointing = false
[parallel]
strategy = "{strategy}"
shares = "equal"
micro_batch = 1
[checkpoint]
every_steps = 1000
[tracking]
tensorboard = false
"""


def main() -> int:
    """Measure memory once, then let the strategies train in turn, `--repeats` times. Returns 0."""
    options = report.arguments(__doc__ or "")
    if os.geteuid() != 0:
        raise SystemExit("error: bytes are counted in a lab of namespaces, which needs root\nfix:   sudo scripts/bench sharding")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the lab is taken down
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        memory = []
        for run in held.measured(folder):
            memory.append(run)
            _say(
                f"{run['method']} {run['precision']} {run['strategy']}: {run['held_bytes'] / 1e6:.0f} MB held, {run['plan_bytes'] / 1e6:.0f} MB planned"
            )
        wire = _on_the_wire(folder, options.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    step_s = {name: [run["step_s"] for run in wire if run["strategy"] == name] for name in _STRATEGIES}
    ratios = [zero2 / ddp for zero2, ddp in zip(step_s["zero2"], step_s["ddp"], strict=True)]
    figures = {
        "zero2_step_over_ddp_100mbit": statistics.median(ratios),
        "held_worst_error_percent": max(abs(run["error_percent"]) for run in memory),
        "wire_worst_error_percent": max(abs(run["wire_error_percent"]) for run in wire),
    }
    report.finish("sharding", figures, [*memory, *wire], _rows(memory, wire, ratios), options.json)
    return 0


def _on_the_wire(folder: Path, repeats: int) -> list[dict[str, Any]]:
    model = tiny_model.tiny_llama(folder / "base", hidden=384, intermediate=1024, layers=4)
    with Lab.up(folder / "lab", nodes=3, backend="namespaces", rate=_RATE, cpu=[0.65] * 3) as lab:
        desk = Desk(folder / "desk", lab)
        desk.folder.mkdir()
        tiny_model.write_jsonl(desk.folder / "chats.jsonl", tiny_model.chat_rows(60))
        for strategy in _STRATEGIES:
            desk.write(f"{strategy}.toml", _RECIPE.format(model=model, strategy=strategy, steps=_LAST))
        runs = []
        with Cables(lab) as cables:
            for turn in range(repeats):
                for strategy in _STRATEGIES[turn % 4 :] + _STRATEGIES[: turn % 4]:
                    runs.append({"what": "wire", "strategy": strategy} | _trained(lab, desk, cables, strategy))
                    _say(f"round {turn + 1} of {repeats}, {strategy}: {runs[-1]['step_s']:.2f} s a step")
        return runs


def _trained(lab: Lab, desk: Desk, cables: Cables, strategy: str) -> dict[str, Any]:
    """One run to its end, and what lies between the ends of two of its steps."""
    run = SeenRun(
        lab,
        name := desk.json("launch", f"{strategy}.toml", "--skip", "collective", timeout_s=_LIMIT_S)["run"],
        RunPaths(desk.folder / "runs" / name),
    )
    try:
        run.wait_for_end(1, len(lab.nodes), timeout_s=_LIMIT_S)
        lines = run.train_lines(1)
        planned = next(price["sent_bytes"] for price in run.plan(1)["strategies"] if price["name"] == strategy)
    finally:
        desk.homelab("stop", run.name, code=None)
    begin, end = (max(line["time"] for line in lines if line["step"] == step) for step in (_FIRST, _LAST))
    steps = _LAST - _FIRST
    sent = max(cables.bytes_between(begin, end).values()) / 2 / steps
    tokens = sum(line["tokens"] for line in lines if _FIRST < line["step"] <= _LAST)
    return {
        "run": name, "step_s": (end - begin) / steps, "tokens_per_s": tokens / (end - begin), "sent_bytes": sent, "plan_sent_bytes": planned,
        "wire_error_percent": 100 * (planned / sent - 1),
    }  # fmt: skip


def _rows(memory: list[dict[str, Any]], wire: list[dict[str, Any]], ratios: list[float]) -> list[tuple[str, str]]:
    rows = [
        (
            f"{run['method']} {run['precision']} {run['strategy']}, MB held (planned)",
            f"{run['held_bytes'] / 1e6:.0f} ({run['plan_bytes'] / 1e6:.0f})",
        )
        for run in memory
    ]
    for strategy in _STRATEGIES:
        runs = [run for run in wire if run["strategy"] == strategy]
        rows.append((f"{strategy} at {_RATE}, s per step", report.spread([run["step_s"] for run in runs])))
        rows.append((f"{strategy}, tokens/s", report.spread([run["tokens_per_s"] for run in runs])))
        rows.append((f"{strategy}, MB per step and direction (planned)", _megabytes(runs)))
    return [*rows, ("zero2 over ddp", report.spread(ratios))]


def _megabytes(runs: list[dict[str, Any]]) -> str:
    return f"{statistics.median(run['sent_bytes'] for run in runs) / 1e6:.1f} ({runs[0]['plan_sent_bytes'] / 1e6:.1f})"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
