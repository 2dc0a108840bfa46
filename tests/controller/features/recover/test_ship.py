"""The files that a run brings along: checked by content on every node, and what is said where the person's own has changed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.recover import resume_guards
from homelab.node.run import supervisor_host
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)

BODY = b'{"text": "a"}\n{"text": "b"}\n'
EDITED = BODY.replace(b"b", b"c")
DIGEST = hashlib.sha256(BODY).hexdigest()


class Nodes(FakeFleet):
    """Three nodes, and where each keeps its copy of the file."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "abc")

    def copy(self, name: str) -> Path:
        return self.nodes[name].workdir / "data" / DIGEST[:16] / "rows.jsonl"

    def sent(self) -> list[str]:
        """Who was sent the file since the last call."""
        names = sorted(self.verbs("receive-file"))
        self.asked.clear()
        return names


def ship(nodes: Nodes, local: Path) -> list[str]:
    item = RecipeInput("train", "shipped", str(local), local, DIGEST)
    return start.ship_material(nodes, ["a", "b", "c"], [item], lambda text: None)


def test_a_copy_that_was_edited_on_a_node_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    nodes, local = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_bytes(BODY)
    assert ship(nodes, local) == []
    assert nodes.sent() == ["a", "b", "c"]
    assert {request["timeout_s"] >= 600 for request in nodes.nodes["a"].requests} == {True}, "a large file is read to its end"
    assert ship(nodes, local) == []
    assert nodes.sent() == [], "who has it is not sent it again"
    nodes.copy("b").write_bytes(EDITED)
    nodes.copy("c").unlink()
    (note,) = ship(nodes, local)
    assert "rows.jsonl had been changed on b:" in note
    assert nodes.sent() == ["b", "c"]
    assert {nodes.copy(name).read_bytes() for name in "abc"} == {BODY}


def test_where_nobody_has_it_as_it_was(tmp_path: Path) -> None:
    nodes, local = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_bytes(BODY)
    ship(nodes, local)
    nodes.copy("b").write_bytes(EDITED)
    local.write_bytes(EDITED)
    with pytest.raises(HomelabError) as caught:
        ship(nodes, local)
    error = caught.value
    assert (
        f"was changed on this node (below its workdir: data/{DIGEST[:16]}/" in error.message
        and "has changed since the launch" in error.message
    )
    assert "node b" in error.where and str(local) in error.hint and DIGEST[:12] in error.hint
    assert nodes.copy("b").read_bytes() == EDITED, "nothing else was put in its place"


def test_a_file_of_the_person_that_has_changed_since_is_named(tmp_path: Path) -> None:
    same, other = tmp_path / "train.py", tmp_path / "rows.jsonl"
    for file in (same, other):
        file.write_bytes(BODY)
    entries = {file.name: {"sent": "shipped", "path": str(file), "name": file.name, "sha256": DIGEST} for file in (same, other)}
    there = {"sent": "on-node", "path": str(other), "name": None, "sha256": "0" * 64}
    described = {"recipe_file": "r.toml", "data": {**entries, "there": there, "eval": None}}
    assert resume_guards.changed_here(described) == []
    other.write_bytes(EDITED)
    (note,) = resume_guards.changed_here(described)
    assert (
        note.startswith(f"{other} was changed since the launch")
        and note.endswith("homelab launch r.toml")
        and note.commands == ("homelab launch r.toml",)
    )
    other.unlink()
    assert resume_guards.changed_here(described) == []


def test_a_supervisor_on_the_head_has_a_small_file_of_its_own(tmp_path: Path) -> None:
    """Else it could not bring the file again to the very node where it was edited."""
    nodes, local, here = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl", tmp_path / "here"
    local.write_bytes(BODY)
    ship(nodes, local)
    entry = {"sent": "shipped", "path": str(local), "name": local.name, "sha256": DIGEST}
    here.mkdir()
    (here / "run.json").write_text(json.dumps({"data": {"train": entry}}))
    supervisor_host._link_data(str(tmp_path / "nodes" / "a"), str(here))
    nodes.copy("a").write_bytes(EDITED)
    assert (here / "code" / "rows.jsonl").read_bytes() == BODY
    assert ship(nodes, here / "code" / "rows.jsonl") and nodes.copy("a").read_bytes() == BODY


def test_a_large_file_has_the_time_that_a_slow_way_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GB to three nodes over one Wi-Fi of 15 MB/s take a quarter of an hour."""
    nodes, local = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_bytes(b"")
    os.truncate(local, 4 << 30)
    monkeypatch.setattr(start, "file_sha256", lambda path: DIGEST)
    nodes.answer("receive-file", {})
    ship(nodes, local)
    limits = [request["timeout_s"] for node in nodes.nodes.values() for request in node.requests if request["verb"] == "receive-file"]
    assert len(limits) == 3 and min(limits) > 3 * (4 << 30) / 1e6


def test_the_first_ctrl_c_ends_the_sending_and_the_nodes_can_be_asked_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has claimed the run has to release it."""
    nodes, local = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_bytes(BODY)
    is_closed = threading.Event()

    def sending(request: dict[str, Any]) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        assert is_closed.wait(20), "nobody has ended it"
        raise UnreachableError("connection lost", where="node a", hint="try again")

    nodes.nodes["a"].answers["receive-file"] = sending
    monkeypatch.setattr(nodes.nodes["a"], "close", is_closed.set)
    with pytest.raises(KeyboardInterrupt):
        ship(nodes, local)
    assert is_closed.is_set()
    released, errors = nodes.ask("release", {"run": "2026-01-01-0000-x", "token": "t"})
    assert set(released) == {"a", "b", "c"} and not errors
