"""The evening of a user on this one card: preflight, launch with a profile, status, a rank that is killed, recover, chat, merge, gguf, report.

Everything is typed as a person does, on this machine as its only node. No answer may hold a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.home import Home, Said
from benchmarks.gpu_parts.place import Place

RECIPE = """[model]
name = "{model}"
[data]
train = "{data}"
[method]
kind = "lora"
rank = 8
alpha = 16
[train]
global_batch = 4
steps = {steps}
learning_rate = 1e-3
seq_len = 256
precision = "{precision}"
[checkpoint]
every_steps = {every}
[tracking]
tensorboard = false
"""


def measure(place: Place) -> None:
    """Each command is tried whatever became of the one before: the run of an earlier one may serve."""
    home, steps = Home.of(place), 100 if place.is_card else 30  # 3 steps a second beside a checkpoint every second step
    model = material.model(place.folder / "model", "small" if place.is_card else "tiny", "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(200, 200))
    recipe = home.folder / "evening.toml"
    recipe.write_text(
        RECIPE.format(model=model, data=data, steps=steps, every=2, precision="bf16" if place.is_card else "fp32"), encoding="utf-8"
    )
    try:
        said = _commands(place, home, recipe)
    finally:
        home.type("stop", limit_s=30)  # where something went wrong, its run is still on the card
    _judge(place, said)
    for file in home.folder.glob("runs/*/energy.json"):
        place.run("energy", content=json.loads(file.read_text()))


def _commands(place: Place, home: Home, recipe: Path) -> dict[str, Said]:
    said = {
        "preflight": home.type("preflight", str(recipe)),
        "launch": home.type("launch", str(recipe), "--profile", "3", "--no-supervise"),
    }
    with place.attempt("kill"):
        _kill(place, home)
    said |= {
        "status": home.type("status", "--json"),
        "recover": home.type("recover", "--wait", "--no-supervise", limit_s=120),
        "why": home.type("why"),
    }
    said |= {
        "chat": home.type("chat", "--prompt", "abc", "--max-new-tokens", "4"),
        "merge": home.type("merge", limit_s=90),
        "gguf": home.type("gguf", limit_s=120),
    }
    return said | {"profile": home.type("profile"), "report": home.type("report", "--json")}


def _kill(place: Place, home: Home) -> None:
    """kill -9 of the rank after its third step. RuntimeError where it does not get so far."""
    deadline = time.monotonic() + 90 * ranks.patience()
    while time.monotonic() < deadline:
        for file in (home.folder / "work" / "runs").glob("*/attempts/1/ranks/0/metrics.jsonl"):
            steps = [json.loads(line)["step"] for line in file.read_text().splitlines() if '"train"' in line]
            pids = workers(home.folder)
            if steps and max(steps) >= 3 and pids:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                place.run("killed", pids=pids, after_step=max(steps))
                return
        time.sleep(0.2)
    raise RuntimeError("the run did not come to its third step, or ended before it was seen there")


def workers(folder: Path) -> list[int]:
    """The ranks of the run in this folder, by the mark in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if b"homelab.worker" in words and b"torch.distributed.run" not in words and f"HOMELAB_RUN_DIR={folder}/".encode() in environment:
            found.append(int(process.name))
    return found


def _judge(place: Place, said: dict[str, Said]) -> None:
    """status and why of a run with a killed rank tell it by their exit code, and the tokenizer of these models is in no converter's list."""
    for name, one in said.items():
        place.figure(f"{name}_s", one.seconds)
        if name not in ("status", "why", "gguf"):
            place.gate(f"{name}_ends_well", one.code == 0)
    place.gate("gguf_is_made_or_refused_in_words", said["gguf"].code == 0 or "error: " in said["gguf"].errors)
    place.gate("nobody_sees_a_traceback", not any(one.has_traceback for one in said.values()))
