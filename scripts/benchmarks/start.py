"""What a start and a recovery send over the cables, measured at the switch of a lab of three nodes.

LoRA on a frozen base of 270 MB (random weights, made there, on every node before anything is measured), fp32, three ranks. A cable's bytes
are those of both directions together; the fullest of the three counts.

start_bytes_over_base    from the moment before the first rank is started to the first optimizer step, over the bytes of the base
recover_bytes_over_base  from `kill -9` of a rank to the first optimizer step of the next attempt, over the bytes of the base

Both hold everything that is on the cables in that time: the ranks' own traffic with the gradients of one step, torchrun, and the
controller that watches. What a launch sends before any rank (preflight, code, data) is told apart.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.faults.ground import SeenRun

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from homelab.lab.network import switch_namespace, switch_port
from homelab.lab.tools import call
from scripts.practice import tiny_model
from scripts.practice.desk import Desk

_LIMIT_S = 300.0
_KILLED = "node3"
_RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
rank = 8
alpha = 16
dropout = 0.0
targets = ["q_proj", "v_proj"]
[train]
global_batch = 3
steps = 500
learning_rate = 1e-3
seq_len = 256
precision = "fp32"
gradient_checkpointing = false
[checkpoint]
every_steps = 2
[tracking]
tensorboard = false
"""


class Cables:
    """Reads the switch's counters five times a second, for as long as it is entered."""

    def __init__(self, lab: Lab) -> None:
        self._switch = switch_namespace(lab.state)
        self._ports = {switch_port(node): node.name for node in lab.nodes}
        self._seen: list[tuple[float, dict[str, int]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="cables")

    def __enter__(self) -> Cables:
        self._seen.append(self._read())
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def bytes_between(self, begin: float, end: float) -> dict[str, int]:
        """node -> bytes on its cable, both directions, between two moments (seconds since 1970); rather a little more than less."""
        while self._seen[-1][0] < end:
            time.sleep(0.1)
        before = max((seen for seen in self._seen if seen[0] <= begin), key=lambda seen: seen[0], default=self._seen[0])
        after = min((seen for seen in self._seen if seen[0] >= end), key=lambda seen: seen[0])
        return {name: after[1][name] - before[1][name] for name in before[1]}

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self._seen.append(self._read())

    def _read(self) -> tuple[float, dict[str, int]]:
        links = json.loads(call("ip", "-j", "-s", "-n", self._switch, "link", "show"))
        counted = {link["ifname"]: link.get("stats64") or link["stats"] for link in links if link["ifname"] in self._ports}
        return time.time(), {self._ports[port]: int(both["rx"]["bytes"]) + int(both["tx"]["bytes"]) for port, both in counted.items()}


def main() -> int:
    """Launch, kill a rank, and look at the counters, `--repeats` times. Returns 0."""
    options = report.arguments(__doc__ or "")
    if os.geteuid() != 0:
        raise SystemExit("error: bytes are counted in a lab of namespaces, which needs root\nfix:   sudo scripts/bench start")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that the lab is taken down
    runs: list[dict[str, Any]] = []
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        model = tiny_model.tiny_llama(folder / "base", hidden=1024, intermediate=4480, layers=4)
        base_bytes = (model / "model.safetensors").stat().st_size
        with Lab.up(folder / "lab", nodes=3, backend="namespaces", cpu=[0.65] * 3) as lab:
            desk = Desk(folder / "desk", lab, supervise=True)
            desk.folder.mkdir()
            tiny_model.write_jsonl(desk.folder / "chats.jsonl", tiny_model.chat_rows(60))
            desk.write("start.toml", _RECIPE.format(model=model))
            with Cables(lab) as cables:
                runs = [_once(lab, desk, cables, base_bytes) for _ in range(options.repeats)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bytes_of = {what: [max(run[what].values()) for run in runs] for what in ("shipping", "start", "recover")}
    figures = {f"{what}_bytes_over_base": statistics.median(bytes_of[what]) / base_bytes for what in ("start", "recover")}
    rows = [
        ("base, MB", f"{base_bytes / 1e6:.0f}"),
        ("before any rank: preflight, code, data, MB", report.spread([size / 1e6 for size in bytes_of["shipping"]])),
        ("start to the first optimizer step, MB", report.spread([size / 1e6 for size in bytes_of["start"]])),
        ("kill -9 to the next optimizer step, MB", report.spread([size / 1e6 for size in bytes_of["recover"]])),
    ]
    report.finish("start", figures, runs, rows, options.json)
    return 0


def _once(lab: Lab, desk: Desk, cables: Cables, base_bytes: int) -> dict[str, Any]:
    """One run: what its launch, its start and its recovery sent, per cable."""
    asked_at = time.time()
    started = desk.json("launch", "start.toml", "--skip", "collective", timeout_s=_LIMIT_S)
    run = SeenRun(lab, started["run"], RunPaths(desk.folder / "runs" / started["run"]))
    try:
        first_at = _first_step(run, 1)
        began_at = min(
            store.read_object(run.folder(node.name) / f"attempts/1/nodes/{node.name}/agent.json")["started_at"] for node in lab.nodes
        )
        _wait_for(lambda: max(run.train_times(1), default=0) >= 4, run, 1)  # a checkpoint is on every node
        killed_at = time.time()
        lab.fault(_KILLED, "kill-worker")
        again_at = _first_step(run, 2)
        return {
            "run": run.name, "base_bytes": base_bytes, "shipping": cables.bytes_between(asked_at, began_at), "start": cables.bytes_between(began_at, first_at),
            "recover": cables.bytes_between(killed_at, again_at), "start_s": first_at - began_at, "recover_s": again_at - killed_at,
            "resumed_at": run.plan(2)["resume_step"],
        }  # fmt: skip
    finally:
        run.kill_supervisor()
        desk.homelab("stop", run.name, code=None)


def _first_step(run: SeenRun, attempt: int) -> float:
    """When the first rank had done its first optimizer step of an attempt (seconds since 1970)."""
    _wait_for(lambda: bool(run.train_times(attempt)), run, attempt)
    return min(run.train_times(attempt).values())


def _wait_for(condition: Callable[[], bool], run: SeenRun, attempt: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"error: attempt {attempt} of {run.name} did not come so far within {_LIMIT_S:.0f} s\n{run.logs(attempt)}")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
