"""A look at a run costs what is new, however long the run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.step_curve import MOST_COLUMNS
from homelab.controller.features.status import failure, monitor
from homelab.controller.run import event_log, run_folder, store
from homelab.controller.run.events import event
from homelab.controller.run.metrics import Gathered
from homelab.shared.protocol.rank_messages import Metric
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(120)
NAMES = ("tower", "laptop")
LONG = (1000, 20_000)


class Training:
    """Two ranks that have made so many steps; their nodes send what they are asked for."""

    def __init__(self, folder: Path, step: int) -> None:
        self.step = step
        self.paths = builders.run_folder(folder / "runs", plan=builders.plan([builders.rank_plan(*entry) for entry in enumerate(NAMES)]))
        self.fleet = FakeFleet(folder / "nodes", NAMES)
        self.fleet.answer("supervisor-look", {"supervisor": None, "owner": {"supervisor": None, "claim": None, "stopped_attempt": None}})
        for rank, name in enumerate(NAMES):
            self.fleet.answer("poll", lambda request, rank=rank: self.say(rank, request["after_lines"].get(str(rank), 0)), [name])
        Gathered(self.paths).add([self.line(number, rank) for number in range(1, step + 1) for rank in (0, 1)], {1: 0})

    def line(self, step: int, rank: int) -> dict[str, Any]:
        return {
            "kind": "train", "attempt": 1, "rank": rank, "step": step, "time": 1000.0 + 3 * step, "loss": 2.0 + 10 / step, "step_s": 2.0,
            "tokens": 10, "tokens_per_s": 5.0,
        }  # fmt: skip

    def say(self, rank: int, known: int) -> dict[str, Any]:
        new = [self.line(number, rank) for number in range(known + 1, self.step + 1)]
        beat = {"time": 1000.0, "phase": "training", "step": self.step, "total_steps": 50_000}
        ranks = {str(rank): {"heartbeat": beat, "metrics": new, "metrics_end_bytes": 100 * self.step}}
        return builders.raw_reply(NAMES[rank], ranks=ranks, name=self.paths.name)


def test_a_look_reads_what_is_new(tmp_path: Path) -> None:
    costs, counts = [], []
    for steps in LONG:
        training = Training(tmp_path / str(steps), steps)
        watcher = monitor.Watcher(training.fleet, training.paths)
        watcher.look()
        before = (watcher.gathered.lines_read, watcher.gathered.bytes_read)
        for _ in range(3):
            training.step += 2
            snapshot = watcher.look()
        costs.append((watcher.gathered.lines_read - before[0], watcher.gathered.bytes_read - before[1]))
        counts.append(len(snapshot.loss_history))
        assert (snapshot.step, snapshot.loss, snapshot.loss_history[0].loss) == (steps + 6, 2.0 + 10 / (steps + 6), 12.0)
        assert snapshot.eta_s == (50_000 - steps - 6) * 3.0
    assert costs[0][0] == costs[1][0] == 12 and abs(costs[0][1] - costs[1][1]) < 200
    assert counts[0] == 1006 and 500 < counts[1] <= 2 * MOST_COLUMNS + 2


def test_a_look_reads_the_plans_that_are_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of months with thousands of attempts, too."""
    training = Training(tmp_path, 10)
    paths, plan = training.paths, training.paths.plan_json(1).read_text()
    for number in range(2, 50):
        store.write_json(paths.plan_json(number), {**json.loads(plan), "attempt": number, "resume_step": number})
    read_json, opened = store.read_json, list[Path]()
    monkeypatch.setattr(store, "read_json", lambda path: opened.append(path) or read_json(path))
    assert run_folder.resume_steps(paths) == {number: number if number > 1 else 0 for number in range(49, 0, -1)}
    assert len(opened) == 49
    store.write_json(paths.plan_json(7), {**json.loads(plan), "attempt": 7, "resume_step": 70})
    paths.plan_json(8).unlink()
    assert run_folder.resume_steps(paths)[7] == 70 and 8 not in run_folder.resume_steps(paths)
    assert len(opened) == 50 and run_folder.heads(paths) == [json.loads(plan)["head"]]


def test_attempts_that_ended_for_an_owner_are_not_asked_why_they_failed(tmp_path: Path) -> None:
    training = Training(tmp_path, 10)
    paths, plan = training.paths, training.paths.plan_json(1).read_text()
    for number in range(2, 9):
        store.write_json(paths.plan_json(number), {**json.loads(plan), "attempt": number})
        event_log.append(
            paths, event("restart" if number != 4 else "trouble", number - 1, because="a game", kind="exit", nodes=[], ranks=[])
        )
    asked: list[int] = []

    def say(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request.get("attempt") or 8)
        return builders.raw_reply(request["node"], attempt=asked[-1], ranks={}, name=paths.name)

    training.fleet.answer("poll", say)
    failure.look(training.fleet, paths, None, lambda text: None)
    assert {8, 3} <= {*asked} and not {7, 6, 5, 4, 2, 1} & {*asked}


def test_only_the_newest_attempts_have_a_pace() -> None:
    measured = Measured(
        Metric(kind="train", attempt=number, step=number, time=float(number), step_s=1.0, loss=5.0) for number in range(1, 100)
    )
    assert len(measured._paces) < 10 and measured.pace(99).ranks and measured.losses.count == 99


def test_a_node_is_told_where_its_lines_end_as_long_as_all_of_them_are_here(tmp_path: Path) -> None:
    training = Training(tmp_path, 40)
    watcher = monitor.Watcher(training.fleet, training.paths)

    def asked() -> list[Any]:
        watcher.look()
        return [request.get("after_bytes", {}) for request in training.fleet.nodes["tower"].requests if request["verb"] == "poll"][-1:]

    assert asked() == [{}] and asked() == [{"0": 4000, "1": 4000}]
    training.paths.metrics_jsonl.write_text("")
    Gathered(training.paths).add([training.line(1, 0)], {1: 0})
    watcher.gathered.refresh()
    assert asked() == [{}], "somebody has cut the file: the lines are asked for by their number"
    assert asked() == [{"0": 4000, "1": 4000}] and watcher.gathered.known.counts(1) == {0: 40, 1: 40}
