"""One process of a node answers question after question, over real sshd: the same answers, and no more trouble than without it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.question_line import ONCE, VERBS, QuestionLine
from homelab.controller.remote.session import CrowdedError
from homelab.controller.run import node_matching
from homelab.lab import Lab, procfs
from homelab.shared.protocol.request import RunRequest
from scripts.practice.desk import wait_until
from tests.controller.remote.test_agent import agent_of
from tests.fakes import FakeStream

pytestmark = pytest.mark.timeout(90)
RUN = "2026-01-01-0000-line"


@pytest.fixture
def agent(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """One that has answered its first question; `alone` counts those that were asked by themselves since."""
    with agent_of(cluster) as one:
        one.ask("runs")
        run, one.alone = one.session.run, 0  # type: ignore[attr-defined]

        def counted(*words: Any, **more: Any) -> Any:
            one.alone += 1  # type: ignore[attr-defined]
            return run(*words, **more)

        monkeypatch.setattr(one.session, "run", counted)
        yield one


def alone(agent: Agent) -> int:
    return int(agent.alone)  # type: ignore[attr-defined]


def lines_of(lab: Lab) -> list[int]:
    """The processes on node1 that answer question after question, not the children that answer."""
    pids = [pid for pid in lab._backend.processes(lab.state, lab.state.node("node1")) if "questions" in procfs.command_line(pid)]
    return [pid for pid in pids if (process := procfs.read(pid)) and process.parent not in pids]


def test_the_answers_are_the_same_and_no_python_starts_for_them(agent: Agent, remote_lab: Lab) -> None:
    for number in range(3):
        assert agent.ask("describe", RunRequest(run=RUN)) == {"run_json": None, "plans": {}}
        assert agent.ask("facts", {"peers": []})["node"] == "node1"
        assert len(lines_of(remote_lab)) == 1 and alone(agent) == 0, number
    with pytest.raises(HomelabError, match="not a usable name"):
        agent.ask("describe", {"run": "../x"})
    assert agent.ask("free-port", {"low": 29600})["port"] >= 29600
    agent.close()
    wait_until(lambda: not lines_of(remote_lab), 10.0)


def test_what_one_question_sets_is_not_there_for_the_next(agent: Agent) -> None:
    node = agent.node

    def cache() -> str:
        return str(agent.ask("facts", {"peers": []})["resources"]["cache_folder"])

    before = cache()
    agent.node = Node.model_validate({**node.model_dump(), "environment": {"HF_HOME": "/of one question"}})
    assert cache() == "/of one question/hub"
    agent.node = node
    assert cache() == before and alone(agent) == 0


def test_a_long_answer_comes_whole(agent: Agent) -> None:
    workdir = Path(agent.ask("facts", {"peers": []})["resources"]["workdir"])
    run = workdir / "runs" / RUN
    (run / "attempts/1/nodes/node1").mkdir(parents=True)
    (run / "attempts/1/ranks/0").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "attempts/1/plan.json").write_text(json.dumps({"ranks": [{"rank": 0, "node": "node1", "local_rank": 0}], "nodes": []}))
    (run / "attempts/1/nodes/node1/start.json").write_text(json.dumps({"command": ["x"], "run": RUN, "attempt": 1}))
    lines = [{"kind": "train", "time": 1.0, "attempt": 1, "rank": 0, "step": step, "words": "ä" * 400} for step in range(3_000)]
    (run / "attempts/1/ranks/0/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    request = node_matching.poll_request(RUN)
    answer = agent.ask("poll", request)
    assert len(json.dumps(answer)) > 6 << 20 and answer["run"]["ranks"]["0"]["metrics"] == lines and alone(agent) == 0


def test_a_line_that_was_killed_costs_nothing(agent: Agent, remote_lab: Lab) -> None:
    agent.ask("runs")
    (pid,) = lines_of(remote_lab)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not lines_of(remote_lab), 10.0)
    agent.ask("runs")
    assert alone(agent) == 1, "it was asked again, by itself"
    agent.ask("runs")
    assert alone(agent) == 1 and len(lines_of(remote_lab)) == 1, "and there is another line"


def test_a_line_that_is_frozen_is_waited_for_as_long_as_any_answer(agent: Agent, remote_lab: Lab) -> None:
    agent.ask("runs")
    (pid,) = lines_of(remote_lab)
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        with pytest.raises(UnreachableError, match="no answer within 1 s"):
            agent.ask("runs", timeout_s=1.0)
        assert time.monotonic() - began_s < 8
        agent.ask("runs")
        assert alone(agent) == 0, "by another line"
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: len(lines_of(remote_lab)) == 1, 10.0)


def test_a_line_that_never_begins_takes_no_longer_than_the_answer_may(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(FakeStream):
        def readline(self, timeout_s: float) -> bytes:
            time.sleep(timeout_s)
            raise TimeoutError

    monkeypatch.setattr(agent.session, "open", lambda *_, **__: Silent([]))
    began_s = time.monotonic()
    with pytest.raises(UnreachableError, match="no answer within 1 s"):
        agent.ask("runs", timeout_s=1.0)
    assert time.monotonic() - began_s < 5 and alone(agent) == 0


def test_two_questions_at_once_are_both_answered(agent: Agent) -> None:
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(agent.ask("facts", {"peers": []})["node"])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["node1"] * 4


def test_a_node_with_room_for_one_command_alone(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshd's MaxSessions 1: the line gives its place to a question that needs a command of its own, and does not take it again."""
    ran = agent.session.run

    def refused(*words: Any, **more: Any) -> Any:
        if agent._line is not None:
            raise CrowdedError("no room", where="node1", hint="")
        return ran(*words, **more)

    monkeypatch.setattr(agent.session, "run", refused)
    agent.ask("runs")
    assert agent._line is not None
    agent.ask("supervisor-look", RunRequest(run=RUN))
    assert agent._line is None
    agent.ask("runs")
    assert agent._line is None and alone(agent) == 2


@pytest.mark.parametrize(
    "said",
    [b"hello\n", b'={"returncode": "0", "stderr": ""}\n', b"=[]\n", b"={}\n", b'={"returncode": 0}\n', b"=" + b"[" * 200 + b"\n", b""],
)
def test_whatever_else_it_says_is_no_answer(said: bytes) -> None:
    with pytest.raises((OSError, ValueError)):
        QuestionLine(FakeStream([said.rstrip(b"\n")] if said else []), "").ask("runs", b"{}\n", io.BytesIO(), 5.0)


def test_it_answers_whatever_a_child_does(tmp_path: Path) -> None:
    """A verb that does not exist, and a child that is killed: the next question is answered."""
    process = subprocess.Popen(
        [sys.executable, "-m", "homelab.node", "questions", "MARK"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).resolve().parents[3],
    )  # fmt: skip
    assert process.stdin and process.stdout

    def ask(verb: str, request: Any) -> tuple[str, dict[str, Any]]:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"verb": verb, "request": request}) + "\n")
        process.stdin.flush()
        said = ""
        while (line := process.stdout.readline()).startswith("+"):
            said += line[1:-1]
        return said, json.loads(line[1:])

    try:
        assert process.stdout.readline() == "MARK\n"
        said, end = ask("nonsense", {})
        assert "does not know 'nonsense'" in json.loads(said)["error"]["message"] and end == {"returncode": 1, "stderr": ""}
        said, end = ask("free-port", {"node": "n", "workdir": str(tmp_path), "low": 29600})
        assert json.loads(said)["port"] >= 29600 and end["returncode"] == 0
        process.stdin.write(json.dumps({"verb": "dry-run", "request": {"node": "n", "workdir": str(tmp_path)}}) + "\n")
        process.stdin.flush()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: bool(children.read_text().split()), 10.0)
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        assert json.loads(process.stdout.readline()[1:])["returncode"] == -signal.SIGKILL
        assert ask("runs", {"node": "n", "workdir": str(tmp_path)})[1]["returncode"] == 0
    finally:
        process.stdin.close()
        assert process.wait(10) == 0


def test_a_start_is_never_asked_twice(agent: Agent, remote_lab: Lab) -> None:
    """Over the line only while it is known to live, and not again where it breaks: the first one may have been heard."""

    def start() -> None:
        with pytest.raises(HomelabError) as refused:
            agent.ask(
                "start", {"run": "../x", "attempt": 1, "run_json": {}, "plan_json": {}, "command": [], "environment": {}, "secrets": {}}
            )
        said.append(str(refused.value))

    said = list[str]()
    start()
    assert alone(agent) == 1, "no line was there"
    agent.ask("runs")
    start()
    assert alone(agent) == 1 and said[0] == said[1], "the same refusal, over the line"
    assert agent._line is not None
    agent._line.answered_s -= 10.0
    start()
    assert alone(agent) == 2, "nothing was heard for a while"
    agent.ask("runs")
    for pid in lines_of(remote_lab):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(UnreachableError, match="start was not answered"):
        agent.ask("start", {"run": RUN, "attempt": 1, "run_json": {}, "plan_json": {}, "command": [], "environment": {}, "secrets": {}})
    assert alone(agent) == 2 and {"start"} == ONCE
    assert not VERBS & {"undo", "receive-file", "collective", "supervisor-start", "run-remove"}
