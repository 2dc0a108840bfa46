"""Files of a run that are damaged on a node while it trains: they count as absent, and the node can be asked all the same."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.facts.reading import read
from homelab.controller.remote import answers
from homelab.controller.remote.poll_reply import parse_replies
from homelab.node import paths
from homelab.node.run import status_stream
from homelab.node.run.poll import MOST_PLANS
from homelab.shared.protocol import files
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.rank_messages import Metric
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(30)

RUN, NODE = "2026-damaged", f"node-{os.getpid()}"
HERE, HOME = f"attempts/1/nodes/{NODE}", "attempts/1/ranks/0"
LINE = {"kind": "train", "time": 5.0, "attempt": 1, "rank": 0, "step": 1, "loss": 2.5}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that was started and trains."""
    folder = tmp_path / "runs" / RUN
    whole: dict[str, Any] = {
        "run.json": {"name": RUN, "created_at": 1.0},
        "attempts/1/plan.json": {"run": RUN, "attempt": 1, "nodes": [], "ranks": [{"rank": 0, "node": NODE, "local_rank": 0}]},
        f"{HERE}/start.json": {"run": RUN, "attempt": 1, "command": ["torchrun"]},
        f"{HERE}/agent.json": {"pid": os.getpid(), "torchrun_pid": os.getpid(), "started_at": 1.0},
        f"{HOME}/heartbeat.json": {"time": 5.0, "pid": os.getpid(), "phase": "training", "step": 1},
        f"{HOME}/metrics.jsonl": LINE,
    }
    for name, value in whole.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(value) + "\n")
    return folder


def request(run: Path) -> dict[str, Any]:
    return {"workdir": str(run.parents[1]), "node": NODE, "run": RUN}


def asked(verb: str, run: Path) -> Any:
    """The answer as the controller gets it."""
    raw = json.loads(
        json.dumps(as_json(ask_node(verb, request(run) if verb != "runs" else {"workdir": str(run.parents[1]), "node": NODE})))
    )
    answer = answers.without_damage(verb, raw)
    assert answers.fault(verb, answer) is None
    return answer


DAMAGE = [
    ("agent.json", "[1]"), ("agent.json", '{"pid":"x","torchrun_pid":1,"started_at":"y"}'), ("agent.json", '{"pid":1,"torchrun_pid":1,"started_at":1e400}'),
    ("error.json", '{"x":1}'), ("exit.json", "[]"), ("exit.json", '{"returncode":"x"}'), ("plan.json", "[1]"), ("plan.json", '{"ranks":[{"x":1}]}'),
    ("plan.json", '{"ranks":5}'), ("heartbeat.json", '{"time":"soon"}'), ("heartbeat.json", '{"time":1e400,"step":1e400}'), ("heartbeat.json", "7"),
    ("metrics.jsonl", '{"step":3}'), ("metrics.jsonl", '{"kind":"train","step":1e400}'), ("metrics.jsonl", '{"kind":"train","time":1e18}'),
    ("metrics.jsonl", '{"kind":["train"]}'), ("metrics.jsonl", '{"kind":"train","loss":1' + 400 * "0" + "}"), ("metrics.jsonl", 100_000 * "["),
    ("run.json", "[1]"), ("run.json", '{"created_at":1e300}'), ("run.json", '{"created_at":[]}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content"), DAMAGE, ids=[f"{name} {content[:40]}" for name, content in DAMAGE])
def test_a_node_with_a_damaged_file_can_be_asked(run: Path, name: str, content: str) -> None:
    file = run / {"run.json": "", "plan.json": "attempts/1"}.get(name, HERE if name in ("agent.json", "exit.json") else HOME) / name
    with file.open("a" if name == "metrics.jsonl" else "w") as stream:
        stream.write(content + "\n")
    answer = asked("poll", run)
    seen = parse_replies({NODE: answer})[NODE].run
    assert seen is not None and seen.attempt == 1 and seen.exit is None
    if name != "plan.json":
        assert seen.ranks[0].metrics == (read(Metric, LINE),), "the lines that are whole stay"
        assert (seen.ranks[0].heartbeat is None) == (name == "heartbeat.json")
    assert asked("describe", run)["plans"].keys() == {"1"}
    assert all(entry["created_at"] in (None, 1.0) for entry in asked("runs", run)["runs"])
    assert isinstance(ask_node("stacks", request(run)).ranks, dict)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(run: Path) -> None:
    (run / HOME / "metrics.jsonl").unlink()
    for name in (f"{HOME}/metrics.jsonl", f"{HERE}/err.log", f"{HERE}/exit.json"):
        os.mkfifo(run / name)
    assert asked("poll", run)["run"]["ranks"]["0"]["metrics"] == []


def test_what_a_supervisor_on_the_node_left_may_be_spoilt(run: Path) -> None:
    here = Path(paths.supervised_dir(str(run.parents[1]), RUN)) / "runs" / RUN
    here.mkdir(parents=True)
    (here / "supervisor.json").write_text('{"doing": 5, "why": ["x"], "pid": "y"}')
    (here / "events.jsonl").write_text('[1]\n{"time": "x"}\n')
    said = parse_replies({NODE: asked("poll", run)})[NODE].supervisor
    assert said is not None and (said.doing, said.why, said.pid) == ("", "", None)


def test_a_signal_goes_to_no_process_of_somebody_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / HOME / "stacks.txt").touch()
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))
    for pid in (os.getpid(), -1, 0, 10**30, True):
        (run / HOME / "heartbeat.json").write_text(json.dumps({"time": 5.0, "pid": pid}))
        ask_node("stacks", request(run))
    assert sent == []


def test_a_folder_is_no_attempt_without_a_word_of_it(run: Path) -> None:
    attempts = run / "attempts"
    (attempts / "7").mkdir()
    (attempts / "07").mkdir()
    shutil.copytree(attempts / "1", attempts / "8")
    (attempts / "9").mkdir()
    (attempts / "9" / "plan.json").write_text('{"run": "another", "attempt": 9, "ranks": []}')
    (attempts / "10" / "nodes" / NODE).mkdir(parents=True)
    (attempts / "10" / "plan.json").write_text("{}")
    assert [*paths.attempts(str(run))] == [1]
    assert (
        asked("poll", run)["run"]["attempt"] == 1 and status_stream.StatusFollower(str(run.parents[1]), RUN, 1, NODE).look(1.0).newest == 1
    )
    (attempts / "7" / "plan.json").write_text(json.dumps({"run": RUN, "attempt": 7, "ranks": []}))
    assert [*paths.attempts(str(run))] == [7, 1], "it counts as soon as its plan is there"


def test_a_plan_that_is_damaged_later_takes_nothing_from_an_attempt(run: Path) -> None:
    assert [*paths.attempts(str(run))] == [1]
    (run / "attempts/1/plan.json").write_text("{")
    assert [*paths.attempts(str(run))] == [1]
    shutil.rmtree(run / "attempts/1")
    assert [*paths.attempts(str(run))] == []


def test_of_thousands_of_attempts_the_newest_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of months has them: each restart, each evening on which a node is with its owner."""
    plan = json.loads((run / "attempts/1/plan.json").read_text())
    for number in range(2, 400):
        (run / "attempts" / str(number)).mkdir()
        (run / "attempts" / str(number) / "plan.json").write_text(json.dumps({**plan, "attempt": number}))
    (run / "attempts" / "400").mkdir()
    read_json, opened = files.read_json, list[str]()
    monkeypatch.setattr(files, "read_json", lambda path: opened.append(str(path)) or read_json(path))
    assert paths.newest_attempt(str(run)) == 399
    assert status_stream.StatusFollower(str(run.parents[1]), RUN, 399, NODE).look(1.0).newest == 399
    assert [name for name in opened if name.endswith("plan.json")].count(str(run / "attempts/399/plan.json")) == len(
        [name for name in opened if name.endswith("plan.json")]
    )
    described = asked("describe", run)["plans"]
    assert list(map(int, described)) == [*range(400 - MOST_PLANS, 400)], "a whole answer has a limit, and would be refused"


def test_counting_attempts_reads_each_plan_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*paths.attempts(str(run))] == [1]
    monkeypatch.setattr(files, "read_json", lambda path: pytest.fail(f"{path} is read again"))
    assert [*paths.attempts(str(run))] == [1]
