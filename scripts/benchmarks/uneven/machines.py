"""Three unequal practice nodes, the `homelab` command, and what a run has written: steps, times, row ids."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.uneven import aftermath, noise
from benchmarks.uneven.meter import Meter

from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from homelab.lab.lab_state import is_lab

CORES = {"node1": 0.6, "node2": 0.3, "node3": 0.2}
"""Speeds of 3 : 1.5 : 1 that leave room on two cores."""
_START_CORES = 1.0  # importing torch at 0.2 core takes half a minute; at most one core, so that every rank computes with one thread
_START_LIMIT_S = 150.0
_ANSWER_LIMIT_S = 120.0
_POLL_S = 0.1
_REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Window:
    """Steps after `first` up to and with `last`: tokens without padding, counted by the benchmark, and seconds between the two ends."""

    first: int
    last: int
    tokens: int
    seconds: float
    rank_tokens: tuple[int, ...]
    step_s: tuple[float, ...]
    ceiling: float | None  # see `noise`; None for a program that does not say how long it computes

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the whole run."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """For the raw measurements."""
        return {
            "steps": [self.first, self.last], "tokens": self.tokens, "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 2), "rank_tokens": self.rank_tokens, "step_s": [round(value, 3) for value in self.step_s],
            "ceiling": self.ceiling,
        }  # fmt: skip


@dataclass
class Run:
    """One launched run. `folders` are its run folders, one per node, in the order of their ranks. `start_s`: until all of them trained."""

    name: str
    folders: dict[str, Path]
    global_batch: int
    row_tokens: Sequence[int]
    start_s: float = 0.0

    def beat(self, rank: int = 0) -> dict[str, Any]:
        """The newest sign of life of a rank, {} when there is none."""
        try:
            beat: dict[str, Any] = json.loads((self._rank_folder(rank) / "heartbeat.json").read_text())
        except (OSError, ValueError):
            return {}
        return beat

    def step(self) -> int:
        """The last step that every rank has done."""
        return min(int(self.beat(rank).get("step", 0)) for rank in range(len(self.folders)))

    def lines(self, rank: int, file: str, kind: str | None = None) -> list[dict[str, Any]]:
        """The finished JSON lines of a rank's file."""
        path = self._rank_folder(rank) / file
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
        entries = [json.loads(line) for line in whole.split("\n") if line]
        return [line for line in entries if kind is None or line["kind"] == kind]

    def times(self) -> dict[int, float]:
        """Step -> when rank 0 had done it, in seconds since 1970."""
        return {line["step"]: line["time"] for line in self.lines(0, "metrics.jsonl", "train")}

    def window(self, first: int, last: int) -> Window:
        """Throughput between the ends of two steps. Every step must hold `global_batch` different rows, or the run was no training."""
        times = self.times()
        rows: dict[int, list[int]] = {step: [] for step in range(first + 1, last + 1)}
        rank_tokens, work = [], []
        for rank in range(len(self.folders)):
            own_rows = self.rows_of(rank)
            self._compare(rank, own_rows)
            rank_tokens.append(sum(self.row_tokens[row] for step in rows for row in own_rows[step]))
            computed_s = {line["step"]: line.get("compute_s") for line in self.lines(rank, "metrics.jsonl", "train")}
            work.append([(sum(self.row_tokens[row] for row in own_rows[step]), computed_s[step]) for step in rows if computed_s.get(step)])
            for step in rows:
                rows[step] += own_rows[step]
        for step, ids in rows.items():
            if len(set(ids)) != self.global_batch or len(ids) != self.global_batch:
                raise SystemExit(f"error: step {step} of {self.name} trained on {len(ids)} rows, {len(set(ids))} different ones")
        step_s = tuple(times[step] - times[step - 1] for step in rows)
        ceiling = noise.ceiling(work) if all(len(of_rank) == last - first for of_rank in work) else None
        return Window(first, last, sum(rank_tokens), times[last] - times[first], tuple(rank_tokens), step_s, ceiling)

    def rows_of(self, rank: int) -> dict[int, list[int]]:
        """Step -> the rows that a rank trained on in it."""
        return {line["step"]: line["ids"] for line in self.lines(rank, "samples.jsonl")}

    def ended(self) -> bool:
        """Whether torchrun has ended on a node."""
        return any((folder / "attempts" / "1" / "nodes" / node / "exit.json").exists() for node, folder in self.folders.items())

    def failed(self) -> bool:
        """Whether torchrun has ended on a node and not well: what its supervisor makes of it is another run."""
        return any(
            json.loads(file.read_text()).get("returncode") != 0
            for node, folder in self.folders.items()
            if (file := folder / "attempts" / "1" / "nodes" / node / "exit.json").exists()
        )

    def logs(self) -> str:
        """The ends of all that the run printed."""
        files = [file for folder in self.folders.values() for file in sorted(folder.glob("attempts/1/nodes/**/*.log"))]
        return "\n".join(f"== {file}\n{file.read_text(errors='replace')[-2000:]}" for file in files if file.stat().st_size)

    def _compare(self, rank: int, ids: dict[int, list[int]]) -> None:
        """The tokens that the worker says it has trained on must be those that are counted here."""
        for line in self.lines(rank, "metrics.jsonl", "train"):
            counted = sum(self.row_tokens[row] for row in ids.get(line["step"], []))
            if line["step"] in ids and line.get("tokens", counted) != counted:
                raise SystemExit(f"error: step {line['step']}, rank {rank} of {self.name}: {line['tokens']} tokens said, {counted} counted")

    def _rank_folder(self, rank: int) -> Path:
        return list(self.folders.values())[rank] / "attempts" / "1" / "ranks" / str(rank)


class Machines:
    """The lab with its CPU limits, and a desk from which runs are launched."""

    def __init__(self, lab: Lab, desk: Path) -> None:
        self.lab = lab
        self.desk = desk
        self.meter = Meter(lab)
        self._living: list[Run] = []

    def start(self, recipes: Sequence[str], row_tokens: Sequence[int], global_batch: int, alone: Sequence[str] = ()) -> tuple[Run, ...]:
        """Launch a recipe on all nodes, or one on each node of `alone` at the same time; returns when all train, at their CPU limits."""
        began = time.monotonic()
        self.limit(dict.fromkeys(CORES, _START_CORES))
        places = [(node,) for node in alone] or [tuple(CORES)]
        launches = [
            self._spawn("launch", recipe, "--json", *(("--nodes", nodes[0]) if alone else ()))
            for recipe, nodes in zip(recipes, places, strict=True)
        ]
        try:
            names = [json.loads(_answer(launch))["run"] for launch in launches]
        finally:
            for launch in launches:
                launch.kill()
                launch.wait()
        runs = []
        for name, nodes in zip(names, places, strict=True):
            folders = {node: Path(self.lab.state.node(node).workdir) / "runs" / name for node in nodes}
            runs.append(Run(name, folders, global_batch, row_tokens))
        self._living += runs
        waiting = {node: (run, rank) for run in runs for rank, node in enumerate(run.folders)}
        deadline = time.monotonic() + _START_LIMIT_S
        while waiting:
            for node, (run, rank) in list(waiting.items()):
                if run.beat(rank).get("phase") == "training":
                    self.limit({node: CORES[node]})
                    run.start_s = round(time.monotonic() - began, 1)
                    del waiting[node]
            self._alive(runs, deadline, "to start training")
        self.meter.begin()
        return tuple(runs)

    def wait_for_step(self, run: Run, step: int, limit_s: float = 300.0) -> None:
        """Wait until every rank has done a step."""
        deadline = time.monotonic() + limit_s
        while run.step() < step:
            self._alive([run], deadline, f"for step {step}")

    def wait_for_end(self, run: Run, limit_s: float = 300.0) -> None:
        """Wait until every rank says that it is done."""
        deadline = time.monotonic() + limit_s
        while not all(run.beat(rank).get("phase") == "done" for rank in range(len(run.folders))):
            self._alive([run], deadline, "to finish", may_end=True)
        self._living.remove(run)

    def stop(self, *runs: Run) -> None:
        """End runs; their nodes get their CPU back for it."""
        self.limit(dict.fromkeys(CORES, _START_CORES))
        for run in runs:
            self.homelab("stop", run.name)
            self._living.remove(run)

    def stop_all(self) -> None:
        """End all runs that have been started and not been stopped."""
        self.stop(*self._living)

    @contextmanager
    def speeds_set_aside(self) -> Iterator[None]:
        """Until the end of this block, no node remembers a measured speed; what is measured meanwhile is forgotten."""
        folders = [Path(node.workdir) / "speeds" for node in self.lab.nodes]
        for folder in folders:
            if folder.is_dir():
                folder.rename(folder.with_name("speeds.aside"))
        try:
            yield
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
                if folder.with_name("speeds.aside").is_dir():
                    folder.with_name("speeds.aside").rename(folder)

    def limit(self, cores: dict[str, float]) -> None:
        """Set CPU limits from now on, in cores."""
        for node, value in cores.items():
            self.lab.fault(node, f"throttle={value:g}")
        self.meter.limited(cores)

    def homelab(self, *arguments: str) -> str:
        """Run a command of homelab to its end; what it printed. Raises SystemExit when it fails."""
        process = self._spawn(*arguments)
        try:
            return _answer(process)
        finally:
            process.kill()
            process.wait()

    def story(self, run: Run) -> str:
        """What there is to say of a run that ended before its time: its events here, and what it printed on the nodes."""
        parts = (aftermath.story(RunPaths(self.desk / "runs" / run.name)), run.logs())
        return "\n".join(part for part in parts if part)

    def _spawn(self, *arguments: str) -> subprocess.Popen[str]:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("HOMELAB_")}
        own = {"HOMELAB_CLUSTER": str(self.lab.cluster_file), "PYTHONPATH": str(_REPOSITORY), "HOMELAB_QUIET": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "homelab", *arguments], cwd=self.desk, env=outside | own, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _alive(self, runs: Sequence[Run], deadline: float, what: str, *, may_end: bool = False) -> None:
        ended = [run for run in runs if (run.failed() if may_end else run.ended())]
        if ended or time.monotonic() > deadline:
            reason = "it ended" if ended else "that took too long"
            raise SystemExit(
                f"error: waited for {runs[0].name} {what}, and {reason}\n" + "\n".join(self.story(run) for run in ended or runs)
            )
        time.sleep(_POLL_S)


def _answer(process: subprocess.Popen[str]) -> str:
    try:
        output, complained = process.communicate(timeout=_ANSWER_LIMIT_S)
    except subprocess.TimeoutExpired:
        words = " ".join(process.args)  # type: ignore[arg-type]
        raise SystemExit(f"error: {words}: no end after {_ANSWER_LIMIT_S:.0f} s") from None
    if process.returncode != 0:
        raise SystemExit(f"error: {' '.join(process.args)}: exit code {process.returncode}\n{output}\n{complained}")  # type: ignore[arg-type]
    return output


@contextmanager
def machines(say: Callable[[str], None], fill: Callable[[Path], None]) -> Iterator[Machines]:
    """Three nodes and a desk in a temporary folder, filled by `fill`. Afterwards nothing of it runs, its supervisors neither.

    The folder is kept where the block fails, and it is said where; after its end, Ctrl-C, `kill` and a closed terminal it is gone.
    """
    # What is ignored stays so: whoever started us wants that (nohup).
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    heeded = [number for number, handler in handlers.items() if handler != signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, aftermath.interrupted)
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    keep = False
    try:
        desk = folder / "desk"
        desk.mkdir()
        fill(desk)
        yield Machines(Lab.up(folder / "lab", names=list(CORES), cpu=[_START_CORES]), desk)
    except (Exception, SystemExit):
        keep = True
        raise
    finally:
        # Whoever is impatient now would leave processes behind.
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)
        say("taking the practice nodes down")
        try:
            if is_lab(folder / "lab"):
                lab = Lab.open(folder / "lab")
                aftermath.end_all(lab.cluster_file)
                lab.down(keep_files=keep)
        finally:
            if keep:
                say(f"kept, to look at: {folder} (desk/runs: the runs as this machine saw them; lab/nodes: what the nodes wrote)")
            else:
                shutil.rmtree(folder, ignore_errors=True)
            for number in heeded:
                signal.signal(number, handlers[number])
