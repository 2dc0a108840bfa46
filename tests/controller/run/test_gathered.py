"""metrics.jsonl of the controller: every step once, whoever writes it, and what was done again replaces what came before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.planning.types import Plan
from homelab.controller.run import metrics, store
from homelab.controller.run.metric_keys import Line, key
from homelab.controller.run.metrics import Gathered, lines_of
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_requests import PollRequest
from scripts.practice.desk import REPOSITORY

pytestmark = pytest.mark.timeout(20)


def train(attempt: int, step: int, rank: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "attempt": attempt, "rank": rank, "step": step, "loss": 5.0 - step / 100, **more}


def steps_of(paths: RunPaths, rank: int = 0) -> list[tuple[int, int]]:
    """(attempt, step) of a rank's training lines, in the order of the file."""
    lines = [json.loads(line) for line in paths.metrics_jsonl.read_text().splitlines()]
    return [(line["attempt"], line["step"]) for line in lines if line["kind"] == "train" and line["rank"] == rank]


class Kept(list[Line]):
    """A taker of all lines."""

    def restart(self) -> None:
        self.clear()

    def take(self, line: Line, _: object) -> None:
        self.append(line)


def kept(paths: RunPaths) -> tuple[Gathered, Kept]:
    lines = Kept()
    return Gathered(paths, lines), lines


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run").mkdir()
    return RunPaths(tmp_path / "run")


def test_what_a_later_attempt_did_again_replaces_what_came_before(paths: RunPaths) -> None:
    gathered = Gathered(paths)
    gathered.add([train(1, step, rank) for step in range(1, 8) for rank in (0, 1)], {1: 0})
    gathered.add([], {1: 0, 2: 5})
    assert steps_of(paths) == [(1, step) for step in range(1, 8)], "nothing is done again yet"
    gathered.add([train(2, 6)], {1: 0, 2: 5})
    expected = [(1, step) for step in range(1, 6)] + [(2, 6)]
    assert steps_of(paths) == expected and steps_of(paths, 1) == expected[:-1]
    gathered.add([train(2, 7), train(3, 6)], {1: 0, 2: 5, 3: 5})
    assert steps_of(paths) == [(1, step) for step in range(1, 6)] + [(3, 6)]
    assert [key(line) for line in kept(paths)[1]] == [key(line) for line in lines_of(paths)]


def test_an_evaluation_that_was_done_again_at_the_same_step_stands_there_once(paths: RunPaths) -> None:
    lines = [{"kind": "eval", "attempt": attempt, "rank": 0, "step": 10, "eval_loss": 4.5} for attempt in (1, 2)]
    gathered = Gathered(paths)
    for line in lines:
        gathered.add([line], {1: 0, 2: 10})
    assert list(lines_of(paths)) == lines[1:]


def test_two_that_look_at_once_write_no_line_twice(paths: RunPaths) -> None:
    first, second = Gathered(paths), Gathered(paths)
    lines = [train(1, step) for step in range(1, 5)]
    first.add(lines[:3], {1: 0})
    second.add(lines, {1: 0})
    first.add(lines, {1: 0})
    assert steps_of(paths) == [(1, 1), (1, 2), (1, 3), (1, 4)]


def test_doubles_that_an_older_homelab_left_go_and_what_is_no_line_is_left_out(paths: RunPaths) -> None:
    broken = '{"kind": 5, "step": "x"}\n[]\n{"kind": "train", "attempt": "2", "step": 1}\n{"kind": "train", "message": []}\n'
    paths.metrics_jsonl.write_text(broken + 2 * (json.dumps(train(1, 1)) + "\n") + '{"kind": "train", "att')
    gathered, lines = kept(paths)
    assert len(lines) == 1
    gathered.add([train(1, 2)], {1: 0})
    assert steps_of(paths) == [(1, 1), (1, 2)]


@pytest.mark.parametrize("lost", ["attempt", "rank", "step"])
def test_a_line_that_has_lost_whose_it_is_is_asked_for_again(paths: RunPaths, lost: str) -> None:
    """A rank's lines are asked for from a number on: one that counts by mistake would hide one that was never here."""
    lines = [train(1, step) for step in (1, 2, 3)]
    shortened = {name: value for name, value in lines[2].items() if name != lost}
    paths.metrics_jsonl.write_text("".join(json.dumps(line) + "\n" for line in (*lines[:2], shortened)))
    gathered, kept_lines = kept(paths)
    assert gathered.known.counts(1) == {0: 2} and kept_lines == lines[:2]
    gathered.add(lines[2:], {1: 0})
    assert gathered.known.counts(1) == {0: 3} and kept_lines == lines


def test_a_file_that_cannot_be_written_ends_nothing(paths: RunPaths) -> None:
    paths.metrics_jsonl.mkdir()
    gathered, lines = kept(paths)
    for _ in range(2):
        gathered.add([train(1, 1)], {1: 0})
        assert [line["step"] for line in lines] == [1] and gathered.known.counts(1) == {0: 1}


@pytest.mark.parametrize("last_saved_by", [0, 2])
def test_what_came_before_an_attempt_is_asked_for_where_it_never_came_here(
    last_saved_by: int, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first head did forty steps and lost power before anybody looked; the next one has them with the checkpoint. Another rank saved that one alone, once
    the head was gone, and the last steps in it have the number of that rank."""
    from homelab.controller.features.status import monitor
    from homelab.controller.run import run_folder

    curve: list[dict[str, Any]] = [train(1, step) for step in range(1, 41)]
    for line in curve[-3:]:
        line["rank"] = last_saved_by
    curve.insert(0, {"kind": "eval", "attempt": 1, "rank": 0, "step": 0, "eval_loss": 5.5})
    asked: list[bool] = []

    class Fleet:
        class cluster:
            nodes = (type("Node", (), {"name": "node2"}),)

        def ask(self, verb: str, request: PollRequest, **_: Any) -> Any:
            asked.append(request.before)
            rank = {"metrics": [train(2, 41)], "before": curve if request.before else []}
            answer = {"node": "node2", "time": 1.0, "run": {"name": paths.name, "attempt": 2, "ranks": {"0": rank}}}
            return {"node2": answer}, {}

    monkeypatch.setattr(run_folder, "plan_of", lambda paths, attempt=None: Plan.model_construct(attempt=2, resume_step=40))
    monkeypatch.setattr(run_folder, "resume_steps", lambda paths: {1: 0, 2: 40})
    watcher = monitor.Watcher(Fleet(), paths)  # type: ignore[arg-type]
    for _ in range(2):
        watcher._ask(["node2"])
    assert steps_of(paths) == [(1, step) for step in range(1, 41)] + [(2, 41)]
    assert asked == [True, False] and os.path.getsize(paths.metrics_jsonl) and not watcher._lacks(40)


def test_a_writer_that_a_person_has_stopped_stops_no_other(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `status` that Ctrl-Z stops in the middle of a write kept the supervisor waiting for ever."""
    monkeypatch.setattr(metrics, "LOCK_S", 0.1)
    monkeypatch.setattr(store, "UNWRITTEN", {})
    gathered, lines = Gathered(paths), [train(1, step) for step in range(1, 5)]
    gathered.add(lines[:2], {1: 0})
    holder = "import os, signal, sys; from homelab.shared.protocol import lock; lock.taken(os.open(sys.argv[1], os.O_RDWR), 9); os.kill(os.getpid(), signal.SIGSTOP)"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", holder, str(paths.root / ".metrics.lock")], env=environment) as process:
        try:
            os.waitpid(process.pid, os.WUNTRACED)
            gathered.add(lines, {1: 0})
            (told,) = store.UNWRITTEN.values()
            assert told.message.startswith(f"process {process.pid} is stopped") and f"kill -CONT {process.pid}" in told.hint
            assert steps_of(paths) == [(1, 1), (1, 2)] and lines[2] not in gathered.known, "the others are asked for again"
        finally:
            process.send_signal(signal.SIGCONT)
            process.wait()
    gathered.add(lines, {1: 0})
    assert steps_of(paths) == [(1, step) for step in range(1, 5)]
