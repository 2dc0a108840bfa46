"""One case: launch, wait for a random moment, inject the fault, wait for the end, measure."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from benchmarks.faults.ground import LIMIT_S, ROWS, Ground, SeenRun, left_on

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs
from scripts.practice.desk import relative_error
from scripts.practice.misconfigurations.misconfiguration import NotInjectable

# death: the end of a process or machine is visible. cut: silence. quiet: nothing must happen. refused: the run must not continue.
Kind = Literal["death", "cut", "quiet", "other", "refused"]
TOLERANCE = 1e-5
ORPHAN_GRACE_S = 20.0
_POLL_S = 0.1


class Unexpected(Exception):
    """An expected event did not happen in time."""


@dataclass(frozen=True)
class Case:
    """One fault. `play` is its whole story; `restarts`: fewest and most that are right, with those that take a node back."""

    name: str
    title: str
    kind: Kind
    play: Callable[[Scene], None]
    restarts: tuple[int, int] = (1, 1)
    ends: str = "done"


@dataclass
class Outcome:
    """The result of a case; None where there is nothing to measure. All times are seconds.

    `missing`: what this machine lacks for the case, which was not played then: neither survived nor failed.
    """

    case: str
    kind: str
    seed: int
    node: str = ""
    step: int = 0
    survived: bool = False
    detect_s: float | None = None
    next_step_s: float | None = None
    worker_start_s: float | None = None
    lost_steps: int | None = None
    restarts: int = 0
    rejoins: int = 0
    orphans: int = 0
    error: float | None = None
    weights_equal: bool | None = None
    exactly_once: bool | None = None
    step_cost: float | None = None
    why: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    run: str = ""
    missing: str = ""

    @property
    def resume_s(self) -> float | None:
        """Fault to next step, less detection."""
        return None if self.next_step_s is None or self.detect_s is None else self.next_step_s - self.detect_s

    @property
    def over_floor_s(self) -> float | None:
        """Fault to next step, less detection and the start of the workers: what the recovery itself takes."""
        if self.next_step_s is None or self.detect_s is None or self.worker_start_s is None:
            return None
        return self.next_step_s - self.detect_s - self.worker_start_s

    def as_dict(self) -> dict[str, Any]:
        """For the raw measurements."""
        return asdict(self) | {"over_floor_s": self.over_floor_s}


class Scene:
    """What a case works with. `run` is set by `train`, `fault_at` (seconds since 1970) by `fault`."""

    def __init__(self, ground: Ground, draw: random.Random) -> None:
        self.ground = ground
        self.lab = ground.lab
        self.draw = draw
        self.run: SeenRun = None
        self.fault_at = 0.0
        self.step = 0
        self.victim = ""
        self.step_cost: float | None = None  # step beside processes that wait over step without them
        self.mounted: set[str] = set()  # nodes whose workdir is something mounted there
        self.begin: Callable[[str], SeenRun] = ground.launch
        self.reference, self.epochs = ground.reference, ground.epochs  # the run that its training is compared with
        self.undo = ExitStack()  # undoes the fault after the measurement

    def node(self, *, head: bool | None = None) -> str:
        """A random node of the run; `head`: only it, or only others. Known before the launch, too: the first is the head then."""
        names = (self.run and self.run.node_names(1)) or [node.name for node in self.lab.nodes]
        self.victim = self.draw.choice(names if head is None else names[:1] if head else names[1:])
        return self.victim

    def launch(self, recipe: str = "train.toml") -> None:
        """Start a run; its ranks are about to load."""
        self.run = self.begin(recipe)
        self.run.mounted = self.mounted

    def train(self, recipe: str = "train.toml") -> None:
        """Launch, then wait for a random step after the first checkpoint; in the first half, so that there is something left to do."""
        self.launch(recipe)
        first = self.ground.every_steps + 1
        target_step = self.draw.randint(first, max(first, int(0.45 * self.ground.steps)))
        self.until(lambda: self.run.heartbeat(1).get("step", 0) >= target_step, f"step {target_step} of attempt 1")
        time.sleep(self.draw.uniform(0.0, 0.3))  # not always just behind a step

    @contextmanager
    def fault(self) -> Iterator[None]:
        """The block injects the fault: times count from its beginning."""
        self.step = int(self.run.heartbeat(1).get("step", 0))
        self.fault_at = time.time()
        yield

    def finish(self, limit_s: float = LIMIT_S) -> None:
        """Wait until the supervisor has nothing more to do."""
        self.until(lambda: self.run.supervisor().get("doing") in ("ended", "given up"), "the supervisor's end", limit_s)

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = LIMIT_S) -> None:
        """Wait. Raises Unexpected."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise Unexpected(f"no {what} within {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def said(self, text: str) -> bool:
        """Whether the supervisor wrote this down since the fault."""
        return any(text in event["what"] for event in self.run.events(self.fault_at))

    def until_step(self, more: int) -> None:
        """Wait until attempt 1 has done some steps more."""
        reached = int(self.run.heartbeat(1).get("step", 0)) + more
        self.until(lambda: self.run.heartbeat(1).get("step", 0) >= reached, f"step {reached} of attempt 1")

    def processes(self, node: str, word: str) -> list[int]:
        """The processes of the run on a node whose command line holds a word."""
        pids = self.lab.processes_of_run(self.run.name)[node]
        return [pid for pid in pids if word in procfs.command_line(pid)]


def play(ground: Ground, case: Case, seed: int) -> Outcome:
    """Play one case from launch to clean nodes. `why` has every problem."""
    scene = Scene(ground, random.Random(f"{seed} {case.name}"))
    outcome = Outcome(case.name, case.kind, seed)
    began = time.time()
    try:
        try:
            case.play(scene)
        except NotInjectable as error:
            outcome.missing = f"{error.message} (install it: {error.hint})"
        except (Unexpected, AssertionError, HomelabError, OSError, RuntimeError) as error:
            outcome.why.append(f"{type(error).__name__}: {str(error)[-600:]}")
        if scene.run is not None and not outcome.missing:
            _measure(scene, case, outcome, began)
    finally:
        if scene.run is not None:
            scene.run.kill_supervisor()
        scene.undo.close()
        ground.restore()
    outcome.survived = not outcome.why and not outcome.missing
    return outcome


def _measure(scene: Scene, case: Case, outcome: Outcome, began: float) -> None:
    run = scene.run
    procfs.until(lambda: not left_on(scene.lab), ORPHAN_GRACE_S)
    left = left_on(scene.lab)
    outcome.run, outcome.node, outcome.step, outcome.orphans = run.name, scene.victim, scene.step, len(left)
    outcome.step_cost = scene.step_cost
    attempts = range(1, run.attempt() + 1)
    events = run.events(scene.fault_at)
    outcome.restarts = len(attempts) - 1
    outcome.rejoins = sum(event.get("kind") == "rejoin" for event in events)
    outcome.events = [f"{event['time'] - scene.fault_at:+.2f} {event['what']}" for event in run.events(began)]
    log = run.paths.supervisor_log
    outcome.log = log.read_text(errors="replace").splitlines()[-60:] if log.exists() else []
    outcome.detect_s = next((event["time"] - scene.fault_at for event in events if event["what"].startswith("trouble: ")), None)
    _measure_steps(run, attempts, scene.fault_at, outcome)
    doing = run.supervisor()
    if (doing.get("doing") == "ended" and doing.get("why") != case.ends) or (doing.get("doing") == "given up" and case.ends != "given up"):
        outcome.why.append(f"the supervisor: {doing.get('doing')}: {doing.get('why')}")
    if left:
        outcome.why.append(f"left on the nodes: {'; '.join(left.values())}")
    fewest, most = case.restarts
    if not fewest <= outcome.restarts <= most:
        outcome.why.append(f"{outcome.restarts} restarts, {outcome.rejoins} of them to take a node back")
    if case.ends == "done":
        _judge_training(scene, outcome)
    if "Traceback" in "\n".join(outcome.log):
        outcome.why.append("a traceback in supervisor.log")


def _measure_steps(run: SeenRun, attempts: range, fault_at: float, outcome: Outcome) -> None:
    """Which steps were done when, how many twice, and when the first one after the fault was done."""
    times = {attempt: run.train_times(attempt) for attempt in attempts}
    outcome.lost_steps = sum(run.lost_steps())
    newer = [attempt for attempt in attempts[1:] if times[attempt] and min(times[attempt].values()) > fault_at]
    if newer:
        first = min(times[newer[0]].values())
        started = run.started_at(newer[0])
        outcome.next_step_s = first - fault_at
        outcome.worker_start_s = first - started if started else None
    elif after := [at for at in times[attempts[-1]].values() if at > fault_at]:
        outcome.next_step_s = min(after) - fault_at


def _judge_training(scene: Scene, outcome: Outcome) -> None:
    reference = scene.reference
    if not scene.run.has_finished():
        outcome.weights_equal = outcome.exactly_once = False if reference is not None else None
        outcome.why.append("no final weights")
        return
    outcome.exactly_once = is_exactly_once(scene.run, scene.epochs)
    if reference is not None:
        outcome.error = relative_error(scene.run.final(), reference.final())
        outcome.weights_equal = outcome.error <= TOLERANCE
    if outcome.weights_equal is False:
        outcome.why.append(f"the weights differ by {outcome.error:.1e}")
    if not outcome.exactly_once:
        outcome.why.append("not every sample once per epoch")


def is_exactly_once(run: SeenRun, epochs: int) -> bool:
    """Every sample once per epoch, over all ranks and attempts; of a step that was done twice the last counts."""
    samples = run.samples()
    return sorted(samples) == list(range(epochs)) and all(sorted(ids) == list(range(ROWS)) for ids in samples.values())
