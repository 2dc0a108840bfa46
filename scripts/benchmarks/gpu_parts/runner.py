"""One part in a process of its own: its limit, its lines, and the end of everything that it started."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import environment
from benchmarks.gpu_parts.catalogue import Part

_KEEP_S = 2.0  # how old the file of --json may be
_PATIENCE = 6  # on a CPU, where it only matters that everything runs


@dataclass
class Outcome:
    """What a part has told so far, and how it ended."""

    state: str = "running"
    seconds: float = 0.0
    problem: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    gates: dict[str, bool] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        """One line of `place.Place`."""
        if "figure" in line:
            self.figures[line["figure"]] = line["value"]
        elif "gate" in line:
            self.gates[line["gate"]] = line["holds"]
        else:
            self.runs.append(line["run"])

    def summary(self) -> dict[str, Any]:
        """For the JSON, without what stands in it elsewhere."""
        return {"state": self.state, "seconds": self.seconds, "problem": self.problem}


def run(part: Part, outcome: Outcome, folder: Path, device: str, limit_s: float, keep: Callable[[], None]) -> None:
    """Run the part, `keep` what it tells every few seconds, and end it and all its processes at the limit. Nothing stays on the disk."""
    own = folder / part.name
    own.mkdir()
    results_file, log = own / "told.jsonl", own / "output.txt"
    results_file.touch()
    patience = 1 if device == "cuda" else _PATIENCE
    limit_s *= patience
    variables = {"BENCH_PATIENCE": str(patience), "PYTHONPATH": environment.python_path(), "CUDA_VISIBLE_DEVICES": environment.first_card()}
    command = [sys.executable, "-m", "benchmarks.gpu_parts.place", part.module, str(own), device, str(results_file)]
    began = time.monotonic()
    process, ended = None, False
    try:
        with _whole(), log.open("w") as output:
            # A group of its own within this session: what ends the session ends the part, too.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables}, process_group=0
            )
        with results_file.open(encoding="utf-8") as lines:
            while not ended and time.monotonic() - began < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(min(_KEEP_S, max(0.01, limit_s - (time.monotonic() - began))))
                    ended = True
                outcome.seconds = time.monotonic() - began
                _read(lines, outcome)
                keep()
            _read(lines, outcome)
    finally:
        if process is not None:
            end(process)
        outcome.seconds = time.monotonic() - began
    if not ended:
        outcome.state, outcome.problem = "out of time", f"ended after its {limit_s:.0f} s"
    elif process.returncode:
        outcome.state, outcome.problem = "failed", _last_words(log)
    else:
        outcome.state = "done"
    if outcome.state != "done" or not all(outcome.gates.values()):
        outcome.runs.append({"what": "output", "text": _end_of(log, 6000)})
        ranks = sorted(file for file in own.rglob("*.txt") if file != log)
        outcome.runs += [{"what": f"output of {file.relative_to(own)}", "text": _end_of(file, 1500)} for file in ranks]
    shutil.rmtree(own, ignore_errors=True)  # models and checkpoints: all parts together would be more than some disks have


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """A SIGTERM waits for the end of the block: a process that is started inside is known by then, and can be ended."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
    if came:
        os.kill(os.getpid(), signal.SIGTERM)


def end(process: subprocess.Popen[Any]) -> None:
    """The process and all of its group: ranks of a part are not left on the card."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(lines: Any, outcome: Outcome) -> None:
    """Whole lines only: one that is just being written is read the next time."""
    while True:
        at = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(at)
            return
        outcome.take(json.loads(line))


def _end_of(file: Path, most: int) -> str:
    return file.read_text(errors="replace")[-most:]


def _last_words(log: Path) -> str:
    words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return words[-1][:300] if words else "it ended without a word"
