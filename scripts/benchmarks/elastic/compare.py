"""The same faults, on the same nodes, under an elastic torchrun: seconds from the fault to the next training step, or never.

Each fault is the very function that plays it against a supervised run. "Never" is: no step within the limit, or every torchrun has
ended; it counts as the limit in medians, and the raw measurements say which it was.
"""

from __future__ import annotations

import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.elastic import settings
from benchmarks.elastic.run import ElasticGround
from benchmarks.elastic.settings import Setting
from benchmarks.elastic.steps import GoesOn, first_after
from benchmarks.faults import catalogue
from benchmarks.faults.ground import Ground, left_on
from benchmarks.faults.scene import Case, Outcome, Scene, Unexpected
from rich.table import Table

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs

LIMIT_S = 120.0
NAMES = ("worker-killed", "power-cut", "head-power-cut", "worker-frozen", "node-frozen", "cable-pulled")
CASES = tuple(case for case in catalogue.ALL if case.name in NAMES)
_POLL_S = 0.2
_MOST_STARTS = 3


@dataclass
class Measured:
    """One fault under one setting. `next_step_s` None: never. All times are seconds."""

    setting: str
    case: str
    seed: int
    limit_s: float
    node: str = ""
    step: int = 0
    next_step_s: float | None = None
    how: str = ""
    worker_start_s: float | None = None
    ranks: int | None = None
    lost_steps: int | None = None
    starts: int = 0
    left: list[str] = field(default_factory=list)
    logs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def played(self) -> bool:
        """Whether the fault happened at all."""
        return not self.how.startswith("not played")

    @property
    def counted_s(self) -> float:
        """The seconds that count in a median."""
        return self.limit_s if self.next_step_s is None else self.next_step_s

    def as_dict(self) -> dict[str, Any]:
        """For the raw measurements."""
        return asdict(self)


class ElasticScene(Scene):
    """A scene whose run is torchrun's, without a supervisor. It ends with the next step, or when no step can follow."""

    def __init__(self, ground: ElasticGround, draw: random.Random, limit_s: float) -> None:
        super().__init__(ground, draw)
        self.limit_s = limit_s
        self.how = "never"

    def processes(self, node: str, word: str) -> list[int]:
        """The cases ask for a module of the worker; here that is the program."""
        return super().processes(node, str(self.program) if word == "homelab.worker" else word)

    @property
    def program(self) -> str:
        """The training program as it stands on its command line."""
        return str(self.lab.folder.parent / "elastic_train.py")

    def goes_on(self) -> GoesOn | None:
        """The first step after the fault, if there is one within the limit."""
        next_step = first_after(self.run.steps(), self.fault_at)  # type: ignore[attr-defined]
        return next_step if next_step and next_step.seconds <= self.limit_s else None

    def said(self, text: str) -> bool:
        """There is no supervisor to report anything; the steps show whether the training continues."""
        return self.goes_on() is not None or not self.run.torchruns()  # type: ignore[attr-defined]

    def finish(self) -> None:
        """Wait until the next step, the limit, or the end of the last torchrun."""
        while self.goes_on() is None and time.time() < self.fault_at + self.limit_s:
            if not self.run.torchruns():  # type: ignore[attr-defined]
                self.how = f"never: every torchrun had ended after {time.time() - self.fault_at:.0f} s"
                return
            time.sleep(_POLL_S)
        next_step = self.goes_on()
        self.how = "never" if next_step is None else "new workers" if next_step.new_workers else "same workers"


def play(ground: Ground, setting: Setting, case: Case, seed: int, limit_s: float = LIMIT_S) -> Measured:
    """One fault from start to clean nodes. Where torchrun never came to the moment of the fault it is "not played", and does not count."""
    measured = Measured(setting.name, case.name, seed, limit_s)
    while measured.starts < _MOST_STARTS:
        measured.starts += 1
        try:
            _play(ground, setting, case, measured)
            return measured
        except (Unexpected, HomelabError, subprocess.SubprocessError) as error:
            measured.how = f"not played: {error}"
    return measured


def _play(ground: Ground, setting: Setting, case: Case, measured: Measured) -> None:
    place = ElasticGround(ground.lab, ground.desk, ground.model, ground.epochs, ground.every_steps, setting=setting)
    scene = ElasticScene(place, random.Random(f"{measured.seed} {case.name}"), measured.limit_s)
    try:
        case.play(scene)
        goes_on = scene.goes_on()
        measured.node, measured.step, measured.how = scene.victim, scene.step, scene.how
        if goes_on:
            measured.next_step_s, measured.ranks, measured.worker_start_s = (goes_on.seconds, goes_on.ranks, goes_on.worker_start_s)
            measured.lost_steps = max(0, scene.step + 1 - goes_on.step)
    finally:
        if place.launched:
            measured.logs = place.launched[0].logs()
        scene.undo.close()
        place.restore()
        _clean(place, measured)


def _clean(place: ElasticGround, measured: Measured) -> None:
    """Remove all of it from the nodes: every process and every file."""

    def gone() -> bool:
        left = left_on(place.lab)
        procfs.send(left, signal.SIGKILL)
        return not left

    if not procfs.until(gone, 20.0):
        measured.left = list(left_on(place.lab).values())
        raise RuntimeError(f"left on the nodes: {'; '.join(measured.left)}")
    for run in place.launched:
        run.forget()


def figures(measured: Iterable[Measured], outcomes: Iterable[Outcome], limit_s: float) -> dict[str, float]:
    """Medians and how many went on, of torchrun with each setting and of the supervised runs with the same faults."""
    result: dict[str, float] = {}
    measured = list(measured)
    for setting in settings.ALL:
        own = [one for one in measured if one.setting == setting.name and one.played]
        if own:
            result[f"torchrun_{setting.name}_median_s"] = statistics.median(one.counted_s for one in own)
            result[f"torchrun_{setting.name}_survived"] = float(sum(one.next_step_s is not None for one in own))
            result[f"torchrun_{setting.name}_played"] = float(len(own))
    ours = [one for one in outcomes if one.case in NAMES and not one.missing]
    if measured and ours:
        seconds = [_within(one, limit_s) for one in ours]
        result["homelab_same_faults_median_s"] = statistics.median(limit_s if value is None else value for value in seconds)
        result["homelab_same_faults_survived"] = float(sum(value is not None for value in seconds))
        result["homelab_same_faults_played"] = float(len(ours))
    return result


def _within(one: Outcome, limit_s: float) -> float | None:
    """Seconds to the next step of a run that ended as it should; None counts as never, as with torchrun."""
    return one.next_step_s if one.survived and one.next_step_s is not None and one.next_step_s <= limit_s else None


def table(measured: Iterable[Measured], outcomes: Iterable[Outcome], limit_s: float) -> Table:
    """Fault by fault: seconds to the next step, side by side."""
    measured, outcomes = list(measured), list(outcomes)
    shown = Table(box=None, pad_edge=False, title="from the fault to the next step, seconds", title_justify="left")
    shown.add_column("fault")
    shown.add_column("homelab", justify="right")
    for setting in settings.ALL:
        shown.add_column(f"torchrun {setting.name}", justify="right")
    for case in CASES:
        ours = [_within(one, limit_s) for one in outcomes if one.case == case.name and not one.missing]
        theirs = [
            [one.next_step_s for one in measured if (one.case, one.setting) == (case.name, setting.name) and one.played]
            for setting in settings.ALL
        ]
        if any(theirs):
            shown.add_row(case.name, *(_cell(values) for values in (ours, *theirs)))
    return shown


def _cell(values: list[float | None]) -> str:
    return ", ".join("never" if value is None else f"{value:.1f}" for value in values)


def line(one: Measured) -> str:
    """One measurement for people."""
    seconds = "" if one.next_step_s is None else f"{one.next_step_s:.1f} s, "
    start = "" if one.worker_start_s is None else f", worker start {one.worker_start_s:.1f} s"
    return f"torchrun {one.setting}, {one.node} at step {one.step}: {seconds}{one.how}{start}, ranks {one.ranks}"


def beside(ground: Ground, case: Case, seed: int, limit_s: float, runs: list[dict[str, Any]], say: Callable[[str], None]) -> list[Measured]:
    """Play a case under torchrun with every setting; nothing for a case that has no counterpart. Appended to `runs`, too."""
    measurements = []
    for setting in settings.ALL if case.name in NAMES else ():
        say(f"seed {seed}, {case.name} under torchrun, {setting.name}")
        measurements.append(play(ground, setting, case, seed, limit_s))
        runs.append({"what": "torchrun", **measurements[-1].as_dict()})
        say(f"  {line(measurements[-1])}")
    return measurements
