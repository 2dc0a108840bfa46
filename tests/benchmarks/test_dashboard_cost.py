"""The benchmark of the dashboard counts each question, whichever way it takes to a node."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import dashboard

from homelab.controller.remote.agent import Agent
from tests import builders
from tests.fakes import FakeNode, FakeStream

ANSWER = (b'+{"runs": []}\n', b'={"returncode": 0, "stderr": ""}\n')


def test_questions_on_a_line_that_stays_open_count_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Agent, "_run", Agent._run)  # put back afterwards
    node = FakeNode("node1", tmp_path)
    node.answers["runs"] = {"runs": []}
    monkeypatch.setattr(node, "open", lambda command, stdin: FakeStream(ANSWER * 3))
    agent = Agent(builders.cluster(("node1",)).node("node1"), node)
    counts = dashboard.counted()
    for _ in range(4):
        assert agent.ask("runs")["runs"] == []
    assert len(node.requests) == 1, "only the first one had a session of its own"
    assert counts == {"questions": 4}
