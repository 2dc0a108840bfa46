"""Real runs of a cut model on practice nodes: what the plan says of step, memory and cables, and what came."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

from benchmarks.faults.ground import SeenRun
from benchmarks.start import Cables

from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from homelab.shared.protocol import files
from homelab.shared.protocol.memory_items import HELD
from scripts.practice import tiny_model
from scripts.practice.desk import Desk

_FIRST, _LAST = 2, 7  # the steps between whose ends is measured; one more, because a checkpoint follows the last one
_LIMIT_S = 300.0
_RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
rank = 8
alpha = 16
[train]
global_batch = 16
steps = {steps}
learning_rate = 1e-4
seq_len = 128
precision = "fp32"
gradient_checkpointing = false
[parallel]
strategy = "pipeline"
[checkpoint]
every_steps = 1000
[tracking]
tensorboard = false
"""


def measured(folder: Path, cpu: list[float]) -> list[dict[str, Any]]:
    """One run that measures speeds, then one at each rate whose plan is compared with what comes."""
    model = tiny_model.tiny_llama(folder / "base", hidden=512, intermediate=1408, layers=16)
    runs: list[dict[str, Any]] = []
    for number, rate in enumerate(("1gbit", "100mbit")):
        with Lab.up(folder / f"lab-{rate}", nodes=3, backend="namespaces", rate=rate, cpu=cpu) as lab:
            desk = Desk(folder / f"desk-{rate}", lab)
            desk.folder.mkdir()
            tiny_model.write_jsonl(desk.folder / "chats.jsonl", tiny_model.chat_rows(96))
            desk.write("pipeline.toml", _RECIPE.format(model=model, steps=_LAST + 1))
            speeds = [Path(lab.state.node(node.name).workdir) / "speeds" for node in lab.nodes]
            with Cables(lab) as cables:
                if number == 0:
                    _trained(lab, desk, cables)
                    _trained(lab, desk, cables)  # the second one is cut by measured speeds, as all that follow
                else:
                    for kept, place in zip(sorted(folder.glob("speeds-*")), speeds, strict=True):
                        shutil.copytree(kept, place, dirs_exist_ok=True)
                runs += [{**one, "rate": rate, "what": f"{one['what']}, {rate}"} for one in _trained(lab, desk, cables)]
            for place, node in zip(speeds, lab.nodes, strict=True):
                shutil.copytree(place, folder / f"speeds-{node.name}", dirs_exist_ok=True)
    return runs


def _trained(lab: Lab, desk: Desk, cables: Cables) -> list[dict[str, Any]]:
    """One run to its end: its step, its cables and the memory of each stage, beside the plan."""
    with Resident() as resident:
        name = desk.json("launch", "pipeline.toml", "--skip", "collective", timeout_s=_LIMIT_S)["run"]
        run = SeenRun(lab, name, RunPaths(desk.folder / "runs" / name))
        try:
            run.wait_for_end(1, len(lab.nodes), timeout_s=_LIMIT_S)
            lines, plan = run.train_lines(1), run.plan(1)
        finally:
            desk.homelab("stop", name, code=None)
    begin, end = (max(line["time"] for line in lines if line["step"] == step) for step in (_FIRST, _LAST))
    steps = _LAST - _FIRST
    sent = {line["rank"]: 0 for line in lines}
    for line in lines:
        sent[line["rank"]] += line["sent_bytes"] if _FIRST < line["step"] <= _LAST else 0
    return [_time(plan, (end - begin) / steps), *_wire(plan, sent, cables.bytes_between(begin, end)), *_memory(plan, resident.most_bytes)]


def _time(plan: dict[str, Any], step_s: float) -> dict[str, Any]:
    planned_s = (plan.get("time") or {}).get("step_s") or float("nan")
    return {
        "what": "step", "step_s": step_s, "planned_s": planned_s, "time_error_percent": 100 * (planned_s / step_s - 1), "text": f"{step_s:.2f} s (planned {planned_s:.2f})",
    }  # fmt: skip


def _wire(plan: dict[str, Any], sent: dict[int, int], counted: dict[str, int]) -> list[dict[str, Any]]:
    """Of each cable: what its rank sends, and what its neighbours send to it, which is as much for each boundary."""
    rows = []
    for rank in plan["ranks"]:
        expected = 2 * sent[rank["rank"]]
        rows.append({
            "what": f"cable of {rank['node']}", "bytes": counted[rank["node"]], "expected_bytes": expected,
            "wire_error_percent": 100 * (counted[rank["node"]] / expected - 1), "text": f"{counted[rank['node']] / 1e6:.1f} MB (of hidden states {expected / 1e6:.1f})",
        })  # fmt: skip
    return rows


def _memory(plan: dict[str, Any], most_bytes: dict[str, int]) -> list[dict[str, Any]]:
    rows = []
    for rank in plan["ranks"]:
        planned = sum(item["size_bytes"] for item in rank["memory"]["items"] if item["name"] != HELD)
        held = most_bytes.get(rank["node"], 0)
        rows.append({
            "what": f"memory of {rank['node']}", "resident_bytes": held, "planned_bytes": planned, "memory_error_percent": 100 * (planned / max(held, 1) - 1),
            "text": f"{held / 1e6:.0f} MB (planned {planned / 1e6:.0f})",
        })  # fmt: skip
    return rows


class Resident:
    """Looks every two seconds at what the worker and its torchrun have in memory on every node, without pages of files with weights."""

    def __init__(self) -> None:
        self.most_bytes: dict[str, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="resident")

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(2.0):
            now: dict[str, int] = {}
            for process in Path("/proc").glob("[0-9]*"):
                command = files.text(process / "cmdline")
                if "homelab.worker" in command and "python" in command:
                    node = next(
                        (
                            word.partition("=")[2]
                            for word in files.text(process / "environ").split("\0")
                            if word.startswith("HOMELAB_NODE=")
                        ),
                        "",
                    )
                    now[node] = now.get(node, 0) + _resident_bytes(process)
            for node, size_bytes in now.items():
                self.most_bytes[node] = max(self.most_bytes.get(node, 0), size_bytes)


def _resident_bytes(process: Path) -> int:
    """Its resident memory, without mapped weights: the kernel drops those where memory is short."""
    total, is_counted = 0, True
    for line in files.text(process / "smaps").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            is_counted = not line.endswith(".safetensors")
        elif first == "Rss:" and is_counted:
            total += int(rest[0]) * 1024
    return total
