"""A look at a run costs what is new, however long the run is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.controller.dashboard.step_curve import MOST_COLUMNS
from homelab.controller.features.status import monitor
from homelab.controller.run.metrics import Gathered
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
