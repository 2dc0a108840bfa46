"""A forwarder brings each step to a tracker once: whatever recoveries there were, whatever ends the forwarder, and whether the tracker is up or not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from homelab.controller.base.errors import TakenError
from homelab.controller.features.track import forwarder as forwarder_module
from homelab.controller.features.track import forwarding
from homelab.controller.features.track.forwarder import Forwarder
from homelab.controller.features.track.forwarding import ForwardRequest
from homelab.controller.features.track.metrics_source import KnownMetrics, MetricsSource
from homelab.controller.features.track.points import Key, TrackedPoint, points_of
from homelab.controller.features.track.trackers import TRACKERS, Sink, TrackerJob, TrackerKind
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log
from homelab.controller.run.metrics import lines_of
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.controller.features.track import metric_lines

pytestmark = pytest.mark.timeout(60)
RUNS = Path(__file__).parents[3] / "fixtures" / "older_runs" / "controller"


@dataclass
class FakeTracker:
    """A tracker that refuses a step it has already. `refusals`: how often it is down from now on; `at`: it goes down in front of this step."""

    runs: dict[str, dict[Key, Mapping[str, float]]] = field(default_factory=dict)
    refusals: int = 0
    at: Key | None = None
    closed: int = 0

    def open(self, job: TrackerJob) -> Sink:
        if self.at is None:
            self._refuse()
        run = self.runs.setdefault(job.known_as or job.name, {})

        def send(point: TrackedPoint) -> None:
            if point.key == self.at:
                self.at = None
                raise ConnectionError("connection reset, key=sk-0123456789abcdef0123456789abcdef")
            assert point.key not in run, f"{point.key} twice"
            run[point.key] = point.values

        return Sink(send, self._close, job.known_as or job.name)

    def _refuse(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError(f"nobody answers on port {self.refusals}")

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTracker:
    tracker = FakeTracker()
    monkeypatch.setattr(
        "homelab.controller.features.track.forwarder.TRACKERS",
        {**TRACKERS, "trackio": TrackerKind("json", "json", tracker.open, "LOGIN", "LOOK")},
    )
    return tracker


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = metric_lines.run_in(tmp_path)
    shutil.copy(RUNS / "2026-11-26-0158-demo" / "run.json", paths.run_json)
    return paths


def look(paths: RunPaths, *, certain_step: int = 0, is_over: bool = False) -> KnownMetrics:
    return KnownMetrics(points_of(lines_of(paths)), "done" if is_over else "running", is_over, certain_step=certain_step)


def bring(forwarder: Forwarder, look: KnownMetrics, now_s: float = 0.0, *, is_patient: bool = False) -> None:
    forwarder.bring(look, is_over=look.is_over, is_patient=is_patient, now_s=now_s)


def there(paths: RunPaths) -> dict[Key, Mapping[str, float]]:
    return {point.key: point.values for point in points_of(lines_of(paths))}


@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "a process per look"])
def test_each_step_is_there_once_and_as_in_metrics_jsonl(paths: RunPaths, fake: FakeTracker, restarts: bool) -> None:
    forwarder = Forwarder(paths, "trackio", again=False)
    for stage, certain_step in enumerate((5, 8, 10)):
        metric_lines.gather(paths, stage)
        if restarts:
            forwarder.close()
            forwarder = Forwarder(paths, "trackio", again=False)
        bring(forwarder, look(paths, certain_step=certain_step))
        assert {step for _, step in fake.runs["run"]} == set(range(1, certain_step + 1)), "what a recovery may compute again waits"
    assert forwarder.progress.waiting == 4
    bring(forwarder, look(paths, is_over=True))
    assert fake.runs == {"run": there(paths)} and [step for kind, step in fake.runs["run"] if kind == "train"] == list(range(1, 15))
    assert (
        forwarder.has_ended
        and fake.closed
        and (forwarder.progress.sent, forwarder.progress.waiting, forwarder.progress.repeated) == (16, 0, 0)
    )


def test_a_tracker_that_is_down_catches_up(paths: RunPaths, fake: FakeTracker) -> None:
    metric_lines.gather(paths, 0)
    forwarder = Forwarder(paths, "trackio", again=False)
    fake.refusals, fake.at = 0, ("train", 3)
    bring(forwarder, look(paths, certain_step=7), 0.0)
    assert forwarder.problem is not None and "connection reset" in forwarder.problem.message and "sk-0123" not in str(forwarder.problem)
    assert set(fake.runs["run"]) == {("train", 1), ("train", 2)}
    bring(forwarder, look(paths, certain_step=7), 1.0)
    assert forwarder.problem is not None, "it waits before it tries again"
    fake.refusals = 2
    for now_s in (3.0, 8.0):
        bring(forwarder, look(paths, certain_step=7), now_s)
        assert forwarder.problem is not None and "nobody answers" in forwarder.problem.message
    bring(forwarder, look(paths, certain_step=7), 30.0)
    assert forwarder.problem is None and fake.runs == {"run": there(paths)}


def test_after_the_end_it_gives_up_unless_it_is_patient(paths: RunPaths, fake: FakeTracker) -> None:
    metric_lines.gather(paths, 0)
    for is_patient in (False, True):
        fake.refusals, forwarder = 1000, Forwarder(paths, "trackio", again=False)
        for now_s in range(0, 4000, 400):
            bring(forwarder, look(paths, is_over=True), now_s, is_patient=is_patient)
        assert forwarder.has_given_up is not is_patient and not fake.runs


def test_what_a_killed_forwarder_was_about_to_send_is_not_sent_twice(
    paths: RunPaths, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    metric_lines.gather(paths, 0)
    killed = Forwarder(paths, "trackio", again=False)
    fake.at = ("train", 3)
    with monkeypatch.context() as only_here:
        only_here.setattr(killed, "_fail", lambda *_, **__: (_ for _ in ()).throw(SystemExit))  # as SIGKILL: nothing more is written
        with pytest.raises(SystemExit):
            bring(killed, look(paths, certain_step=7))
    metric_lines.gather(paths, 1)
    bring(Forwarder(paths, "trackio", again=False), look(paths, is_over=True))
    assert {step for kind, step in fake.runs["run"] if kind == "train"} == {1, 2, *range(8, 12)}, (
        "a step may be missing, none is there twice"
    )
    bring(Forwarder(paths, "trackio", again=True), look(paths, is_over=True))
    assert fake.runs["run-again-2"] == there(paths)


def test_a_package_that_is_missing_is_told_and_not_tried_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = TrackerKind("no_such_tracker", "no-such-tracker>=1", FakeTracker().open, "LOGIN", "LOOK")
    monkeypatch.setattr("homelab.controller.features.track.forwarder.TRACKERS", {**TRACKERS, "trackio": missing})
    metric_lines.gather(paths, 0)
    forwarder = Forwarder(paths, "trackio", again=False)
    bring(forwarder, look(paths, is_over=True))
    assert forwarder.has_given_up and forwarder.problem is not None and "no-such-tracker>=1" in str(forwarder.problem.hint)


def test_an_outage_is_told_once_and_one_process_sends(paths: RunPaths, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    metric_lines.gather(paths, 0)
    paths.state_json.write_text('{"state": "done", "attempt": 1, "intent": "running"}')
    monkeypatch.setattr(forwarder_module, "retry_wait_s", lambda _failures: 0.0)
    monkeypatch.setattr(forwarding, "_TICK_S", 0.0)
    fake.refusals, said = 3, list[str]()

    def say(text: str) -> None:
        said.append(text)
        if "nobody answers" in text:
            with pytest.raises(TakenError):
                forwarding.track(fleet, paths, ForwardRequest(["trackio"]), said.append)

    with Fleet(builders.cluster()) as fleet:
        state, progress = forwarding.track(fleet, paths, ForwardRequest(["tensorboard", "trackio"]), say)
    assert (state, progress["trackio"].problem, progress["tensorboard"].sent) == ("done", None, 8) and fake.runs == {"run": there(paths)}
    told = [text for text in said if "nobody answers" in text]
    assert len(told) == 1 and "where: " in told[0] and "fix:   " in told[0] and said[-1] == "trackio takes the run's metrics again"
    notes = [line["text"] for line in event_log.lines(paths)]
    assert len(notes) == 1 and "the run is not touched" in notes[0]


def test_a_run_that_is_recovered_while_its_tracker_is_down_is_sent_to_its_end(
    paths: RunPaths, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder_module, "retry_wait_s", lambda _failures: 0.0)
    for name in ("_TICK_S", "_OVER_S"):
        monkeypatch.setattr(forwarding, name, 0.0)
    fake.refusals, stages = 3, [(0, "failed", True), (1, "running", False), (2, "done", True)]

    def looked(_source: MetricsSource) -> KnownMetrics:
        stage, state, is_over = stages.pop(0) if len(stages) > 1 else stages[0]
        metric_lines.gather(paths, stage)
        return KnownMetrics(points_of(lines_of(paths)), state, is_over, certain_step=8, next_s=0.0 if len(stages) > 1 else 60.0)

    monkeypatch.setattr(MetricsSource, "look", looked)
    with Fleet(builders.cluster()) as fleet:
        state, _ = forwarding.track(fleet, paths, ForwardRequest(["trackio"], is_patient=True), lambda _text: None)
    assert state == "done" and fake.runs == {"run": there(paths)} and ("train", 14) in fake.runs["run"]


def test_a_tracker_that_was_given_up_at_the_end_is_tried_again_after_a_recovery(paths: RunPaths, fake: FakeTracker) -> None:
    metric_lines.gather(paths, 0)
    fake.refusals, forwarder = forwarder_module.TRIES_AFTER_END, Forwarder(paths, "trackio", again=False)
    for now_s in range(0, 4000, 400):
        bring(forwarder, look(paths, is_over=True), now_s)
    assert forwarder.has_given_up
    metric_lines.gather(paths, 1)
    bring(forwarder, look(paths, certain_step=7), 5000.0)
    assert forwarder.problem is None and ("train", 7) in fake.runs["run"]
