"""A controller with a terminal: the real `homelab` command as subprocesses, and the files of its runs on the nodes of a lab."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from homelab.lab import Lab, procfs
from scripts.practice import prepared_commands

COMMAND = [sys.executable, "-m", "homelab"]
REPOSITORY = Path(__file__).resolve().parents[2]


class Desk:
    """A controller: a folder with recipes and runs, and the cluster file of a lab."""

    def __init__(self, folder: Path, lab: Lab, cluster: Path | None = None, *, supervise: bool = False) -> None:
        self.folder = folder
        self.lab = lab
        self.supervise = supervise
        self.cluster = cluster or lab.cluster_file

    def homelab(self, *arguments: str, code: int | None = 0, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run one command to its end. Fails the test when it leaves with another exit code than `code` (None: any)."""
        done = prepared_commands.run(arguments, cwd=self.folder, env=self._environment(), timeout_s=timeout_s)
        said = f"homelab {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert code is None or done.returncode == code, said
        assert "Traceback" not in done.stderr, said  # stdout may quote a worker's
        return done

    def json(self, *arguments: str, code: int | None = 0, timeout_s: float = 120) -> Any:
        """The JSON document a command prints with --json."""
        return json.loads(self.homelab(*arguments, "--json", code=code, timeout_s=timeout_s).stdout)

    def spawn(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """Start a command in a session of its own and with no signal ignored, as a terminal would; stdout and stderr come together."""
        return subprocess.Popen(
            [*COMMAND, *arguments], cwd=self.folder, env=self._environment() | environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=heed_signals,
        )  # fmt: skip

    def start(self, *arguments: str, stdout: IO[bytes], stderr: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a command whose output goes to files, and leave it."""
        return subprocess.Popen(
            [*COMMAND, *arguments], cwd=self.folder, env=self._environment(), stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
        )

    def launch(self, recipe: str, *options: str) -> Run:
        """`homelab launch --json`: the run it has started. The collective test and the model that a node builds have tests of their own."""
        started = self.json("launch", recipe, "--skip", "collective", "--skip", "model", *options)
        return Run(self.lab, started["run"])

    def write(self, name: str, text: str) -> Path:
        """A file on this desk."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def _environment(self) -> dict[str, str]:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("HOMELAB_")}
        own = {"HOMELAB_CLUSTER": str(self.cluster), "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
        own["HOMELAB_SUPERVISE"] = str(self.supervise).lower()  # recovery by hand, unless a test asks for the other
        return outside | own


class Run:
    """One run, as its nodes have it on their disks."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name

    def folder(self, node: str) -> Path:
        """The run's folder on a node."""
        return Path(self.lab.state.node(node).workdir) / "runs" / self.name

    def heartbeat(self, attempt: int, rank: int = 0) -> dict[str, Any]:
        """The newest sign of life of a rank, {} when there is none."""
        for file in self._files(f"attempts/{attempt}/ranks/{rank}/heartbeat.json"):
            return _read(file)
        return {}

    def exits(self, attempt: int) -> dict[str, dict[str, Any]]:
        """node -> how torchrun ended there; nodes where it has not are absent."""
        return {file.parent.name: _read(file) for file in self._files(f"attempts/{attempt}/nodes/*/exit.json")}

    def wait_for_step(self, attempt: int, step: int, *, rank: int = 0, timeout_s: float = 90) -> int:
        """Wait until a rank has done this step; the step it is at."""

        def reached() -> bool:
            assert not self.exits(attempt), f"it ended before step {step}: {self.logs(attempt)}"
            return bool(self.heartbeat(attempt, rank).get("step", 0) >= step)

        wait_until(reached, timeout_s, lambda: self.logs(attempt))
        return int(self.heartbeat(attempt, rank)["step"])

    def wait_for_end(self, attempt: int, nodes: int, *, timeout_s: float = 120) -> None:
        """Wait until torchrun ended on that many nodes."""
        wait_until(lambda: len(self.exits(attempt)) == nodes, timeout_s, lambda: self.logs(attempt))

    def wait_for_output(self, attempt: int, node: str, text: str, *, timeout_s: float = 60) -> None:
        """Wait until a worker of this node has printed `text`."""
        pattern = f"attempts/{attempt}/nodes/{node}/logs/*/*/*/stdout.log"
        wait_until(lambda: any(text in file.read_text() for file in self._files(pattern)), timeout_s, lambda: self.logs(attempt))

    def logs(self, attempt: int) -> str:
        """All that an attempt printed, for the message of a test that fails."""
        files = [*self._files(f"attempts/{attempt}/nodes/*/*.log"), *self._files(f"attempts/{attempt}/nodes/*/logs/*/*/*/*.log")]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files if file.stat().st_size)

    def attempts(self) -> list[int]:
        """Numbers of all attempts, rising."""
        return sorted({int(folder.name) for folder in self._files("attempts/*")})

    def losses(self) -> dict[int, float]:
        """Step -> logged global loss; of the newest attempt that did the step."""
        found: dict[int, float] = {}
        for attempt in self.attempts():
            lines = [line for file in self._files(f"attempts/{attempt}/ranks/0/metrics.jsonl") for line in _lines(file)]
            found |= {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
        return found

    def samples(self) -> dict[int, list[int]]:
        """Epoch -> ids of all samples trained on, over all ranks; for each step the newest attempt that did it counts."""
        steps: dict[int, tuple[int, list[int]]] = {}
        for attempt in self.attempts():
            here: dict[int, tuple[int, list[int]]] = {}
            for file in self._files(f"attempts/{attempt}/ranks/*/samples.jsonl"):
                for line in _lines(file):
                    _, ids = here.setdefault(line["step"], (line["epoch"], []))
                    ids += line["ids"]
            steps |= here
        epochs: dict[int, list[int]] = {}
        for epoch, ids in steps.values():
            epochs.setdefault(epoch, []).extend(ids)
        return epochs

    def weights(self, node: str, file: str = "adapter_model.safetensors") -> Any:
        """The final tensors, as numpy arrays."""
        from safetensors.numpy import load_file

        return load_file(self.folder(node) / "final" / file)

    def _files(self, pattern: str) -> Iterator[Path]:
        for node in self.lab.nodes:
            yield from sorted(self.folder(node.name).glob(pattern))


def heed_signals() -> None:
    """What is ignored stays so in children: under nohup and behind a shell's `&` that holds for a closed terminal and Ctrl-C."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def name_said(output: str) -> str | None:
    """The run's name in what `homelab launch` printed, None when it never came so far."""
    found = re.search(r"^(?:\. )?run (\d{4}-\d\d-\d\d-\d{4}-\S+)", output, re.MULTILINE)
    return found.group(1) if found else None


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The output of a process up to the line that holds `text`. Fails the test when it ends first."""
    assert process.stdout is not None
    seen = ""
    while line := process.stdout.readline():
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} was never printed:\n{seen}")


def read_rest(process: subprocess.Popen[str], timeout_s: float = 30) -> str:
    """What a process prints from here to its end. (Not `communicate`: that loses what `readline` has read ahead.)"""
    assert process.stdout is not None
    seen = process.stdout.read()
    process.wait(timeout_s)
    process.stdout.close()
    return seen


def kill_whole(process: subprocess.Popen[str]) -> None:
    """SIGKILL to a process of `Desk.spawn` and all of its session."""
    os.killpg(process.pid, signal.SIGKILL)
    read_rest(process)


def relative_error(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """max |found - expected| / max |expected| over all the tensors together."""
    assert set(found) == set(expected)
    size = max(float(abs(expected[name]).max()) for name in expected)
    return max(float(abs(found[name].astype("float64") - expected[name].astype("float64")).max()) for name in expected) / size


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str] = lambda: "") -> None:
    """Poll until true; fail the test with what `explain` says when that takes longer than `timeout_s`.

    A condition that costs is asked less often: a command asks every node, and keeps the cores from what is waited for.
    """
    asked = time.monotonic()
    deadline = asked + timeout_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"not true within {timeout_s} s\n{explain()}"
        time.sleep(min(max(0.01, 4 * (now - asked)), 1.0))
        asked = time.monotonic()


def left_on(lab: Lab) -> dict[int, str]:
    """pid -> command line of what any run has left on the nodes: its processes, and the agent's."""
    found = {}
    for node in lab.nodes:
        for pid in lab.processes_of(node.name):
            words = procfs.command_line(pid)
            if "HOMELAB_RUN" in procfs.environment(pid) or "homelab.node" in words:
                found[pid] = f"{node.name}: {' '.join(words)[:200]}"
    return found


def wait_until_none_left(lab: Lab, said: str = "") -> None:
    """An agent ends a moment after its connection; a run's processes are gone before the command says so. Fails after five seconds."""
    wait_until(lambda: not left_on(lab), 5.0, lambda: f"{said}\nleft: {left_on(lab)}")


def copy_of_cluster(lab: Lab, folder: Path) -> Path:
    """cluster.toml as a second laptop would have it: keys and host keys named by where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    text = lab.cluster_file.read_text(encoding="utf-8")
    for name in (tomllib.loads(text)["cluster"]["known_hosts"], tomllib.loads(text)["defaults"]["identity_file"]):
        text = text.replace(f'"{name}"', f'"{lab.folder / name}"')
    copy = folder / "cluster.toml"
    copy.write_text(text, encoding="utf-8")
    return copy


def _read(file: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value


def _lines(file: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file; one that a killed worker left unfinished is no line."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.split("\n") if line]
