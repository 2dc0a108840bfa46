"""Where faults happen: three practice nodes, a desk whose runs are supervised, one recipe, and the undisturbed run."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab, procfs
from scripts.practice import tiny_model
from scripts.practice.desk import Desk, Run
from scripts.practice.misconfigurations.node_changes import view

NODES = ("node1", "node2", "node3")
ROWS = 240
GLOBAL_BATCH = 12
STEPS_PER_EPOCH = ROWS // GLOBAL_BATCH
LIMIT_S = 420.0  # a run with its recoveries; a machine that computes for others too is slow
BEGIN_S = 120.0
_STAGE_LAYERS = 6  # enough for three nodes, and for two when one is lost
# Steps of about a second on half a core, in several passes: slowed to a tenth they take as long as a hang was once thought to.
SLOW: dict[str, Any] = {"epochs": 30, "every_steps": 10, "global_batch": 240}

# Longer than it takes until the processes of the next attempt wait (`homelab.node.run.standby`).
LONG: dict[str, Any] = {"epochs": 90, "every_steps": 40}

RECIPE = """
[model]
name = "{model}"
[data]
train = "{data}"
[method]
kind = "lora"
rank = {rank}
alpha = 8
dropout = 0.0
[train]
global_batch = {global_batch}
epochs = {epochs}
learning_rate = 1e-3
warmup_steps = 2
seq_len = 256
weight_decay = 0.01
max_grad_norm = 0.5
precision = "fp32"
gradient_checkpointing = false
[checkpoint]
every_steps = {every_steps}
[tracking]
tensorboard = false
"""

# A user's own program: it works for some seconds on every rank, then one rank raises an error.
BROKEN = """
import os, time
import torch.distributed as dist

dist.init_process_group("gloo")
for turn in range(8):
    dist.barrier()
    time.sleep(0.25)
if dist.get_rank() == 1:
    scores = {"loss": 1.0}
    print(scores["los"])
dist.barrier()
"""


@dataclass
class Ground:
    """The lab and the desk. `epochs`, `every_steps` and `rank` are those of the recipe; `reference` is None before it was made."""

    lab: Lab
    desk: Desk
    model: Path
    epochs: int
    every_steps: int
    rank: int = 4
    strategy: str = "auto"
    reference: SeenRun | None = None
    slow_reference: SeenRun | None = None  # of `SLOW`
    long_reference: SeenRun | None = None  # of `LONG`

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.epochs * STEPS_PER_EPOCH

    def recipe(self, *, data: str = "chats.jsonl", more: str = "", **changes: int) -> str:
        """The text of the recipe. `changes`: epochs, every_steps, global_batch."""
        usual = {"epochs": self.epochs, "every_steps": self.every_steps, "global_batch": GLOBAL_BATCH}
        strategy = "" if self.strategy == "auto" else f'[parallel]\nstrategy = "{self.strategy}"\n'
        return RECIPE.format(model=self.model, data=data, rank=self.rank, **(usual | changes)) + strategy + more

    def launch(self, recipe: str = "train.toml", *options: str) -> SeenRun:
        """`homelab launch` with a supervisor; returns when both are started."""
        started = self.desk.json("launch", recipe, *options, timeout_s=BEGIN_S)
        return SeenRun(self.lab, started["run"], RunPaths(self.desk.folder / "runs" / started["run"]))

    def runs(self) -> list[SeenRun]:
        """All runs of the desk, those whose launch failed in the middle too."""
        return [SeenRun(self.lab, path.name, RunPaths(path)) for path in (self.desk.folder / "runs").glob("*")]

    def restore(self) -> None:
        """Every node on, thawed, plugged, and without a process of any run; and no supervisor that looks after one."""
        for run in self.runs():
            run.kill_supervisor()
        for node in self.lab.status()["nodes"]:
            if node["power"] == "off":
                self.lab.fault(node["name"], "power-on")
            if node["cable"] == "pulled":
                self.lab.fault(node["name"], "plug-cable")
            if node["frozen"]:
                self.lab.fault(node["name"], "thaw")
            self.lab.fault(node["name"], "throttle=off")
        procfs.send(left_on(self.lab), signal.SIGKILL)


class SeenRun(Run):
    """A run, seen from the nodes' disks and from the controller's folder."""

    def __init__(self, lab: Lab, name: str, paths: RunPaths) -> None:
        super().__init__(lab, name)
        self.paths = paths
        self.mounted: set[str] = set()  # nodes that have something of their own mounted on their workdir

    def folder(self, node: str) -> Path:
        """The run's folder on a node."""
        plain = super().folder(node)
        return view(self.lab, node, plain) if node in self.mounted else plain

    def attempt(self) -> int:
        """The newest attempt that the controller knows."""
        numbers = [int(path.name) for path in (self.paths.root / "attempts").glob("*") if path.name.isdecimal()]
        return max(numbers, default=1)

    def plan(self, attempt: int) -> dict[str, Any]:
        """Who computes what in an attempt."""
        return store.read_object(self.paths.plan_json(attempt))

    def node_names(self, attempt: int) -> list[str]:
        """The nodes of an attempt; the head is the first."""
        return [node["name"] for node in self.plan(attempt).get("nodes", [])]

    def events(self, after_s: float = 0.0) -> list[dict[str, Any]]:
        """The controller's events since then (seconds since 1970)."""
        return [event for event in store.read_lines(self.paths.events_jsonl) if event.get("time", 0.0) >= after_s]

    def supervisor(self) -> dict[str, Any]:
        """The supervisor's own record of its work."""
        return store.read_object(self.paths.supervisor_json)

    def supervisor_alive(self) -> bool:
        """Whether the process that wrote this record runs."""
        pid = self.supervisor().get("pid")
        return isinstance(pid, int) and {"supervise", self.name} <= {*procfs.command_line(pid)}

    def kill_supervisor(self) -> None:
        """kill -9, if it runs."""
        if self.supervisor_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.supervisor()["pid"], signal.SIGKILL)

    def train_times(self, attempt: int) -> dict[int, float]:
        """Step -> when the first rank had done it (seconds since 1970), in one attempt."""
        time_of: dict[int, float] = {}
        for line in self.train_lines(attempt):
            time_of[line["step"]] = min(line["time"], time_of.get(line["step"], float("inf")))
        return time_of

    def train_lines(self, attempt: int) -> list[dict[str, Any]]:
        """What all ranks wrote of their steps in one attempt."""
        files = self._files(f"attempts/{attempt}/ranks/*/metrics.jsonl")
        return [line for file in files for line in store.read_lines(file) if line.get("kind") == "train"]

    def started_at(self, attempt: int) -> float | None:
        """When torchrun ran on the last node of an attempt (seconds since 1970)."""
        agents = [store.read_object(file) for file in self._files(f"attempts/{attempt}/nodes/*/agent.json")]
        return max((agent["started_at"] for agent in agents if "started_at" in agent), default=None)

    def lost_steps(self) -> list[int]:
        """For every restart: how many steps that were done had to be done again."""
        attempts, lost = range(1, self.attempt() + 1), []
        for before, attempt in itertools.pairwise(attempts):
            reached = max(self.train_times(before), default=self.plan(before).get("resume_step", 0))
            lost.append(max(0, reached - self.plan(attempt).get("resume_step", 0)))
        return lost

    def standstills_s(self) -> dict[int, float]:
        """Attempt that followed a restart -> seconds from the last step that counts to its first one, beyond what that takes otherwise."""
        found, done_at = {}, self.train_times(1)
        for attempt in range(2, self.attempt() + 1):
            times, resumed = self.train_times(attempt), self.plan(attempt).get("resume_step", 0)
            if times and resumed in done_at:
                in_order = sorted(times.values())
                steps_s = [later - earlier for earlier, later in itertools.pairwise(in_order)] or [0.0]
                found[attempt] = max(0.0, in_order[0] - done_at[resumed] - statistics.median(steps_s))
            done_at |= times
        return found

    def has_finished(self) -> bool:
        """Whether the final weights were written."""
        return any(self._files("final/adapter_model.safetensors"))

    def final(self) -> Any:
        """The final tensors."""
        from safetensors.numpy import load_file

        return load_file(next(iter(self._files("final/adapter_model.safetensors"))))


def left_on(lab: Lab) -> dict[int, str]:
    """pid -> command line of what any run has left on the nodes. (The agents that answer the controller are no part of a run.)"""
    line_of = {}
    for node in lab.nodes:
        for pid in lab.processes_of(node.name):
            if "HOMELAB_RUN" in procfs.environment(pid):
                line_of[pid] = f"{node.name}: {' '.join(procfs.command_line(pid))[:160]}"
    return line_of


@contextlib.contextmanager
def ground(
    epochs: int, every_steps: int, *, keep: Path | None = None, rank: int = 4, rate: str | None = None, strategy: str = "auto"
) -> Iterator[Ground]:
    """The lab with its desk; all of it is gone afterwards, supervisors too. `keep`: a folder for the runs' controller folders.

    `rank` of the adapters and `rate` of the cables ("12mbit") together say how long a step waits for the network. `strategy`: the recipe's.
    """
    folder = Path(tempfile.mkdtemp(prefix="homelab-chaos-"))
    try:
        with Lab.up(folder / "lab", names=list(NODES), backend="namespaces", cpu=[1.0], rate=rate) as lab:
            place = folder / "desk"
            place.mkdir()
            model = tiny_model.tiny_llama(folder / "tiny-llama", layers=_STAGE_LAYERS if strategy == "pipeline" else 2)
            made = Ground(lab, Desk(place, lab, supervise=True), model, epochs, every_steps, rank, strategy)
            tiny_model.write_jsonl(place / "chats.jsonl", tiny_model.chat_rows(ROWS))
            made.desk.write("train.toml", made.recipe())
            made.desk.write("slow.toml", made.recipe(**SLOW))
            made.desk.write("long.toml", made.recipe(**LONG))
            made.desk.write("cold.toml", made.recipe(**LONG, more="[recovery]\nstandby = false\n"))
            made.desk.write("broken.py", BROKEN)
            made.desk.write("broken.toml", '[script]\npath = "broken.py"\n')
            try:
                yield made
            finally:
                for run in made.runs():
                    run.kill_supervisor()
                if keep is not None and (place / "runs").is_dir():
                    shutil.copytree(place / "runs", keep, dirs_exist_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
