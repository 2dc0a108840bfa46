"""What is said of a run that had ended when its nodes cannot be asked any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.config.cluster import Cluster
from homelab.control import diagnosed, find, watch
from homelab.dashboard.snapshot import Snapshot
from homelab.diagnose.cause import Diagnosis
from homelab.errors import UnreachableError
from homelab.runs import store
from homelab.runs.paths import RunPaths
from tests.dashboard import sample

pytestmark = pytest.mark.timeout(30)


class Off:
    """A cluster whose machines are switched off."""

    cluster = Cluster.model_validate({"name": "attic", "nodes": tuple({"name": node.name, "host": node.name} for node in sample.plan().nodes)})

    def ask(self, *_: Any, names: list[str], **__: Any) -> Any:
        return {}, {name: UnreachableError("no route to host", where=f"node {name}", hint="wake it") for name in names}


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The folder of a run here."""
    found = RunPaths(tmp_path / sample.RUN)
    found.root.mkdir()
    monkeypatch.setattr(find, "plan_of", lambda paths: sample.plan())
    monkeypatch.setattr(watch.head_supervisor, "recorded", lambda paths: "")
    return found


def look(paths: RunPaths, state: str, attempt: int = 1) -> Snapshot:
    store.set_state(paths, state, attempt)
    store.event(paths, state)
    fleet: Any = Off()
    return watch.Watcher(fleet, paths, "").look()


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_a_run_that_had_ended_stays_so_when_its_nodes_are_switched_off(paths: RunPaths, state: str) -> None:
    seen = look(paths, state)
    assert (seen.state, seen.diagnosis) == (state, None), "that a machine is off today is not why it ended"
    assert seen.notes[-1].startswith(f"{state}, as was seen before; tower, laptop, old cannot be asked now (they are off")
    assert store.read_object(paths.state_json)["state"] == state
    assert [event["what"] for event in store.events(paths)] == [state]


def test_what_had_failed_keeps_its_cause(paths: RunPaths) -> None:
    why = Diagnosis(cause="disk-full", title="the disk of laptop is full", first_node="laptop", hint="make room", retryable=False)
    diagnosed.keep(paths, 1, why, {})
    seen = look(paths, "failed")
    assert (seen.state, seen.diagnosis) == ("failed", why)


def test_a_run_that_trained_is_lost(paths: RunPaths) -> None:
    assert look(paths, "running").state == "lost"
    assert look(paths, "done", attempt=0).state == "lost", "an older attempt had ended"
