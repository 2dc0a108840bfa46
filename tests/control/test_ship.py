"""The files that a run brings along: checked by content on every node, and what is said where the person's own has changed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from homelab.control import identity, start
from homelab.control.material import Material
from homelab.errors import HomelabError
from homelab.node import supervisor, transfer
from homelab.remote.fanout import Fleet

pytestmark = pytest.mark.timeout(30)

BODY = b'{"text": "a"}\n{"text": "b"}\n'
EDITED = BODY.replace(b"b", b"c")
DIGEST = hashlib.sha256(BODY).hexdigest()


class Agent:
    """A node's own code without a wire."""

    def __init__(self, workdir: Path, sent: list[str]) -> None:
        self.workdir, self.sent = workdir, sent

    def ask(self, verb: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert verb == "has-file" and timeout_s >= 600, "a large file is read to its end"
        return transfer.has_file({"workdir": str(self.workdir), **request})

    def send(self, verb: str, request: dict[str, Any], body: BinaryIO) -> dict[str, Any]:
        self.sent.append(self.workdir.name)
        try:
            return transfer.receive_file({"workdir": str(self.workdir), **request}, body)
        except ValueError as error:
            raise HomelabError(str(error)) from error


class Nodes:
    """Stands for a fleet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.sent: list[str] = []

    def agent(self, name: str) -> Agent:
        return Agent(self.root / name, self.sent)

    def copy(self, name: str) -> Path:
        return self.root / name / "data" / DIGEST[:16] / "rows.jsonl"


def ship(nodes: Nodes, local: Path) -> list[str]:
    item = Material("train", "shipped", str(local), local, DIGEST)
    return start.ship_material(cast(Fleet, nodes), ["a", "b", "c"], [item], lambda text: None)


def test_a_copy_that_was_edited_on_a_node_is_replaced_and_that_is_said(tmp_path: Path) -> None:
    nodes, local = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl"
    local.write_bytes(BODY)
    assert ship(nodes, local) == [] and sorted(nodes.sent) == ["a", "b", "c"]
    nodes.sent.clear()
    assert ship(nodes, local) == [] and nodes.sent == [], "who has it is not sent it again"
    nodes.copy("b").write_bytes(EDITED)
    nodes.copy("c").unlink()
    (note,) = ship(nodes, local)
    assert "rows.jsonl had been changed on b:" in note and sorted(nodes.sent) == ["b", "c"]
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
    assert "was changed on this node" in error.message and "not as it was at the launch" in error.message
    assert "node b" in error.where and str(local) in error.hint and DIGEST[:12] in error.hint
    assert nodes.copy("b").read_bytes() == EDITED, "nothing else was put in its place"


def test_a_file_of_the_person_that_has_changed_since_is_named(tmp_path: Path) -> None:
    same, other = tmp_path / "train.py", tmp_path / "rows.jsonl"
    for file in (same, other):
        file.write_bytes(BODY)
    entries = {file.name: {"sent": "shipped", "path": str(file), "name": file.name, "sha256": DIGEST} for file in (same, other)}
    there = {"sent": "on-node", "path": str(other), "name": None, "sha256": "0" * 64}
    described = {"recipe_file": "r.toml", "data": {**entries, "there": there, "eval": None}}
    assert identity.changed_here(described, "") == []
    other.write_bytes(EDITED)
    (note,) = identity.changed_here(described, " --cluster c.toml")
    assert note.startswith(f"{other} was changed since the launch") and note.endswith("homelab launch r.toml --cluster c.toml")
    other.unlink()
    assert identity.changed_here(described, "") == []


def test_a_supervisor_on_the_head_has_a_small_file_of_its_own(tmp_path: Path) -> None:
    """Else it could not bring the file again to the very node where it was edited."""
    nodes, local, here = Nodes(tmp_path / "nodes"), tmp_path / "rows.jsonl", tmp_path / "here"
    local.write_bytes(BODY)
    ship(nodes, local)
    entry = {"sent": "shipped", "path": str(local), "name": local.name, "sha256": DIGEST}
    here.mkdir()
    (here / "run.json").write_text(json.dumps({"data": {"train": entry}}))
    supervisor._link_data(str(tmp_path / "nodes" / "a"), str(here))
    nodes.copy("a").write_bytes(EDITED)
    assert (here / "code" / "rows.jsonl").read_bytes() == BODY
    assert ship(nodes, here / "code" / "rows.jsonl") and nodes.copy("a").read_bytes() == BODY
