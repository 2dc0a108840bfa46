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
