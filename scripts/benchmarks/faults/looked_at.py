"""Runs that are looked at while they are recovered: `launch --wait` and `status --wait` on the same machine, `status --wait` on another one.

Who looks ends nothing and stops nothing: all of them end with the run, and with its exit code.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults import deaths
from benchmarks.faults.ground import BEGIN_S, LIMIT_S, ROWS, SeenRun
from benchmarks.faults.scene import Case, Scene, Unexpected

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from scripts.practice import tiny_model
from scripts.practice.desk import Desk, copy_of_cluster

LEAVE_S = 60.0  # after the run's end; on another machine a supervisor counts for some seconds after its last word
RECUT: dict[str, Any] = {"epochs": 2, "every_steps": 10, "global_batch": 8}
_turns = itertools.count()


class Lookers:
    """The commands that look at one run. Their output is in files: nobody reads it while they look."""

    def __init__(self, scene: Scene, options: tuple[str, ...] = ()) -> None:
        self._scene, self._options = scene, options
        folder = scene.ground.desk.folder.with_name(f"another machine {next(_turns)}")
        self._other = Desk(folder, scene.lab, copy_of_cluster(scene.lab, folder))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        scene.undo.callback(self.end)

    def launch(self, recipe: str) -> SeenRun:
        """`homelab launch --wait`; the others look from its first moment on."""
        desk = self._scene.ground.desk
        name = self._begin(desk, "launch --wait", "launch", recipe, "--skip", "collective", "--wait", "--json", *self._options)
        self._scene.until(lambda: self._output(name).startswith("{") and "}\n" in self._output(name), "word of the launch", BEGIN_S)
        started = json.JSONDecoder().raw_decode(self._output(name))[0]
        self._begin(desk, "status --wait", "status", started["run"], "--wait")
        self._begin(self._other, "status --wait elsewhere", "status", started["run"], "--wait")
        return SeenRun(self._scene.lab, started["run"], RunPaths(desk.folder / "runs" / started["run"]))

    def _begin(self, desk: Desk, name: str, *words: str) -> str:
        with self._file(name).open("wb") as out, self._file(f"{name}, errors").open("wb") as errors:
            self._processes[name] = desk.start(*words, stdout=out, stderr=errors)
        return name

    def _file(self, name: str) -> Path:
        return self._other.folder / f"{name}.out"

    def _output(self, name: str) -> str:
        return self._file(name).read_text(encoding="utf-8", errors="replace")

    def leave(self) -> None:
        """Each ends with 0, as the run does, and has stopped nothing. Raises Unexpected."""
        deadline, wrong = time.monotonic() + LEAVE_S, []
        for name, process in self._processes.items():
            try:
                code: int | None = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            said = self._output(name) + self._output(f"{name}, errors")
            if code != 0 or "Traceback" in said:
                wrong.append(f"{name} ended with {code}: {said[-400:]}")
        stops = [
            desk.folder.name
            for desk in (self._scene.ground.desk, self._other)
            for event in self._events(desk)
            if event.get("event") == "stopped"
        ]
        if wrong or stops:
            raise Unexpected("; ".join([*wrong, *(f"the run was stopped from {name}" for name in stops)]))

    def _events(self, desk: Desk) -> list[dict[str, object]]:
        return store.read_lines(RunPaths(desk.folder / "runs" / self._scene.run.name).events_jsonl)

    def end(self) -> None:
        """Whatever has happened."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def looked_at(play: Callable[[Scene], None], *options: str) -> Callable[[Scene], None]:
    """The same story, with lookers."""

    def played(scene: Scene) -> None:
        lookers = Lookers(scene, options)
        scene.begin = lookers.launch
        play(scene)
        lookers.leave()

    return played


def recut(scene: Scene) -> None:
    """Two nodes are believed to be equally fast, and one has a quarter of the other's processor: the layers move by themselves."""
    ground, model = scene.ground, scene.ground.desk.folder.with_name("larger-llama")
    if not model.exists():
        tiny_model.tiny_llama(model, hidden=512, intermediate=1024, layers=12)
    names = [node.name for node in scene.lab.nodes][:2]
    scene.reference, scene.epochs = None, RECUT["epochs"]  # that the curve stays the same: tests/e2e/test_recut.py
    text = ground.recipe(**RECUT).replace(str(ground.model), str(model))
    ground.desk.write("recut.toml", text if ground.strategy != "auto" else text + '[parallel]\nstrategy = "pipeline"\n')
    scene.victim = names[0]
    for node in scene.lab.nodes:
        shutil.rmtree(Path(node.workdir) / "speeds", ignore_errors=True)  # what an earlier case has measured: the plan would know
    scene.lab.fault(scene.victim, "throttle=0.25")  # taken back by `Ground.restore`
    scene.launch("recut.toml")
    with scene.fault():
        scene.finish(2 * LIMIT_S)
    if not any(event.get("kind") == "recut" for event in scene.run.events()):
        raise Unexpected(f"the layers did not move in {RECUT['epochs'] * ROWS // RECUT['global_batch']} steps")


CASES = (
    Case("looked-at-frozen", "a worker is stopped by SIGSTOP, and looked at", "cut", looked_at(deaths.frozen_worker), restarts=(1, 1)),
    Case("looked-at-power-cut", "a node loses its power, and the run is looked at", "cut", looked_at(deaths.power_cut), restarts=(1, 1)),
    Case("looked-at-rejoin", "a node comes back, and the run is looked at", "cut", looked_at(deaths.comes_back), restarts=(2, 2)),
    Case(
        "looked-at-recut",
        "layers move to another node, and the run is looked at",
        "other",
        looked_at(recut, "--nodes", "node1,node2"),
        restarts=(1, 2),
    ),
)
