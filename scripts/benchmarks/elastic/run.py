"""One training under torchrun on the practice nodes, started over SSH on each of them, as a person does it by hand."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.elastic import steps
from benchmarks.elastic.settings import DEFAULT, Setting
from benchmarks.faults.ground import Ground
from benchmarks.faults.scene import Unexpected

from homelab.controller.base.shell import quote_words
from homelab.lab import Lab, procfs

PROGRAM = Path(__file__).with_name("train.py")
START_TIMEOUT_S = 60.0
_NOISE = ("]   ", "Loading weights", "FutureWarning", "warnings.warn(", "Environment variable", "hostname of the client")


class ElasticRun:
    """What the cases of faults ask of a run, answered from the nodes' disks and process tables."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.mounted: set[str] = set()

    def folder(self, node: str) -> Path:
        """Log, steps and checkpoint of one node, on its own disk."""
        return Path(self.lab.state.node(node).home) / "torchrun" / self.name

    def node_names(self, attempt: int = 1) -> list[str]:
        """The nodes; the head is the first."""
        return [node.name for node in self.lab.nodes]

    def steps(self) -> list[steps.Step]:
        """All that any rank has done so far."""
        done_steps = []
        for name in self.node_names():
            file = self.folder(name) / "steps.jsonl"
            if file.exists():
                done_steps += steps.parse(file.read_text(encoding="utf-8", errors="replace"))
        return done_steps

    def heartbeat(self, attempt: int, rank: int = 0) -> dict[str, Any]:
        """The step that was reached."""
        return {"step": max((one.step for one in self.steps()), default=0)}

    def torchruns(self) -> list[int]:
        """The torchrun processes that are left on any node."""
        pids_by_node = self.lab.processes_of_run(self.name).values()
        return [pid for pids in pids_by_node for pid in pids if "torch.distributed.run" in procfs.command_line(pid)]

    def logs(self, last: int = 20) -> dict[str, list[str]]:
        """node -> the last lines of what torchrun and its worker printed there, without lists of settings and progress bars."""
        lines_of = {}
        for name in self.node_names():
            file = self.folder(name) / "torchrun.log"
            lines = file.read_text(errors="replace").splitlines() if file.exists() else []
            lines_of[name] = [line for line in lines if line.strip() and not any(word in line for word in _NOISE)][-last:]
        return lines_of

    def forget(self) -> None:
        """Remove its files from the nodes."""
        for name in self.node_names():
            shutil.rmtree(self.folder(name), ignore_errors=True)


@dataclass
class ElasticGround(Ground):
    """The same lab, model, data and moments; what is launched is torchrun with a setting."""

    setting: Setting = DEFAULT
    launched: list[ElasticRun] = field(default_factory=list)

    def launch(self, recipe: str = "") -> ElasticRun:  # type: ignore[override]
        """Start torchrun on all nodes; returns when each of them has it. Raises Unexpected, CalledProcessError."""
        run = ElasticRun(self.lab, f"torchrun-{self.setting.name}-{time.time_ns() // 1_000_000}")
        self.launched.append(run)
        program = shutil.copy(PROGRAM, self.lab.folder.parent / "elastic_train.py")  # where the nodes can read it
        head = self.lab.nodes[0].host
        for node in self.lab.nodes:
            folder = run.folder(node.name)
            words = [
                str(program), f"--model={self.model}", f"--data={self.desk.folder / 'chats.jsonl'}", f"--folder={folder}",
                f"--every-steps={self.every_steps}",
            ]  # fmt: skip
            environment = {
                "HOMELAB_RUN": run.name,  # by which the lab finds its processes
                "GLOO_SOCKET_IFNAME": node.interface,
                "OMP_NUM_THREADS": "1",  # a node has one core
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "true",
                "PYTHONUNBUFFERED": "1",
                "LOGLEVEL": "INFO",  # torchrun logs its actions; the measurement keeps its last lines
                **dict(self.setting.environment),
            }
            command = self.setting.command(node.python, run.name, head, words)
            assigned = [f"{key}={value}" for key, value in environment.items()]
            text = quote_words(["setsid", "--fork", "env", *assigned, *command])
            shell = f"mkdir -p {folder} && cd {folder} && {text} > torchrun.log 2>&1 < /dev/null"
            subprocess.run([*self.lab.ssh_command(node.name), shell], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
        if not procfs.until(lambda: len(run.torchruns()) == len(self.lab.nodes), START_TIMEOUT_S):
            raise Unexpected("torchrun did not start on all nodes")
        return run
