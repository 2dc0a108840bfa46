"""A launch asks whose machines these are when it begins and before it starts: preflight takes minutes, in which somebody may come home."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.attempt.placement import SupervisorPlacement
from homelab.controller.base.errors import BusyError
from homelab.controller.base.say import Say
from homelab.controller.config.program_command import TypedCommand
from homelab.controller.features.launch import launch_run, start_run
from homelab.controller.features.launch.launch_run import LaunchRequest
from homelab.controller.run import leave_folder
from homelab.controller.run.leave import Leave
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
TYPED = TypedCommand(("python", "train.py", "--name", "two words"), "/home/me/work")


@contextlib.contextmanager
def silent() -> Iterator[Say]:
    yield lambda text: None


@pytest.mark.parametrize(("typed", "before"), [(None, "homelab launch RECIPE"), (TYPED, "homelab run")])
def test_a_node_that_was_given_back_during_preflight_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: TypedCommand | None, before: str
) -> None:
    started: list[str] = []
    monkeypatch.setattr(start_run, "start_run", lambda *_given, **_more: started.append("yes"))
    fleet, plan, runs = FakeFleet(tmp_path / "nodes"), builders.plan(), tmp_path / "runs"
    request = LaunchRequest(Path("r.toml"), Path("cluster.toml"), runs, (), "no", typed=typed)
    given: Any = (fleet, SimpleNamespace(), plan, request, SupervisorPlacement("no"), SimpleNamespace(progress=silent))
    launch_run._start(*given)
    assert started == ["yes"]
    name, *others = (node.name for node in plan.nodes)
    leave_folder.write(runs, Leave(node=name, since=time.time()))
    with pytest.raises(BusyError) as caught:
        launch_run._start(*given)
    behind = " -- python train.py --name 'two words'" if typed else ""
    assert started == ["yes"] and f"{before} --nodes {','.join(others)}{behind}; or take it back" in str(caught.value.hint)
    assert not [*(tmp_path / "nodes").rglob("claims/2*.json")], "and its claim is gone"
