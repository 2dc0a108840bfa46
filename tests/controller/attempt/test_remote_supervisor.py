"""What goes to a supervisor on a node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from homelab.controller.attempt import remote_supervisor
from homelab.controller.run import leave_folder
from homelab.controller.run.leave import Leave
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)


def test_it_knows_what_was_typed_here(tmp_path: Path) -> None:
    """A supervisor that was there before may have been told of a leave that is over."""
    fleet, paths = FakeFleet(tmp_path / "nodes"), builders.run_folder(tmp_path / "runs", plan=builders.plan())
    place = remote_supervisor.SupervisorPlace("tower", paths.name)
    beside = tmp_path / "nodes" / "tower" / "supervised" / paths.name / "runs"
    leave_folder.write(beside, Leave(node="laptop", since=time.time()))
    leave_folder.write(paths.root.parent, Leave(node="laptop", since=time.time(), is_back=True))
    leave_folder.write(paths.root.parent, Leave(node="oldtower", since=time.time()))
    fleet.answer("supervisor-start", {"log": "here"})
    remote_supervisor.start(fleet, paths, place, lambda text: None)
    assert sorted(leave_folder.lasting(beside)) == ["oldtower"] and (beside / paths.name / "run.json").exists()


def test_data_that_lies_on_the_nodes_is_not_sent_once_more(tmp_path: Path) -> None:
    """Also the second of two files of one name, which has a folder of its own."""
    entry = {"kind": "file", "sent": "shipped", "name": "data.jsonl", "sha256": "ab" * 32}
    paths = builders.run_folder(tmp_path / "runs", plan=builders.plan(), data={"train": entry, "eval": {**entry, "sha256": "cd" * 32}})
    for place in ("data.jsonl", f"{'cd' * 32}/data.jsonl", "recipe.toml"):
        (paths.code / place).parent.mkdir(parents=True, exist_ok=True)
        (paths.code / place).write_text("x")
    sent = remote_supervisor._folder_of(paths)
    assert [name for name in sent if "/code/" in name] == [f"runs/{paths.name}/code/recipe.toml"]
