"""A node that is asked for a checkpoint: where the word lies, and who is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import files, layout
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(30)
RUN = "2026-01-01-0000-run"


@pytest.fixture
def request_of(tmp_path: Path) -> dict[str, Any]:
    """Attempts 1 and 2 were started here."""
    folder = tmp_path / "runs" / RUN
    files.write_json(folder / "run.json", {"name": RUN})
    for attempt in (1, 2):
        files.write_json(folder / layout.plan_json(attempt), {"run": RUN, "attempt": attempt, "nodes": [], "ranks": []})
        files.write_json(folder / layout.node(attempt, "laptop") / "start.json", {"run": RUN, "attempt": attempt})
    return {"workdir": str(tmp_path), "node": "laptop", "run": RUN, "attempt": 2}


def test_it_lies_where_the_worker_looks(tmp_path: Path, request_of: dict[str, Any]) -> None:
    for _ in range(2):
        assert ask_node("save", request_of) == Done()
    assert (tmp_path / "runs" / RUN / layout.save_request(2, "laptop")).is_file()


def test_a_node_that_was_renamed_is_asked_by_the_name_that_its_ranks_know(tmp_path: Path, request_of: dict[str, Any]) -> None:
    ask_node("save", request_of | {"node": "thinkpad"})
    assert (tmp_path / "runs" / RUN / layout.save_request(2, "laptop")).is_file()


@pytest.mark.parametrize("other", [{"attempt": 1}, {"attempt": 3}, {"run": "2026-01-01-0000-other"}])
def test_an_attempt_that_does_not_train_here_is_refused(tmp_path: Path, request_of: dict[str, Any], other: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="does not train on this node"):
        ask_node("save", request_of | other)
    assert not list(tmp_path.rglob("save.json"))
