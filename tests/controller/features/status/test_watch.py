"""What is said of a run that had ended when its nodes cannot be asked any more."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.attempt import diagnosis_store, remote_supervisor
from homelab.controller.base.hint import Hint
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.status import monitor
from homelab.controller.run import event_log, events, run_folder, store
from homelab.controller.run.paths import RunPaths
from tests.controller.dashboard import sample
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The folder of a run here."""
    found = RunPaths(tmp_path / sample.RUN)
    found.root.mkdir()
    monkeypatch.setattr(run_folder, "plan_of", lambda paths: sample.plan())
    monkeypatch.setattr(remote_supervisor, "recorded", lambda paths: "")
    return found


def look(paths: RunPaths, state: str, attempt: int = 1) -> Snapshot:
    """What is said of the run while all its machines are switched off."""
    store.set_state(paths, state, attempt)
    event_log.append(paths, events.state(state, attempt))
    fleet = FakeFleet(paths.root.parent, [node.name for node in sample.plan().nodes])
    for node in fleet.nodes.values():
        node.is_off = True
    return monitor.Watcher(fleet, paths).look()


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_a_run_that_had_ended_stays_so_when_its_nodes_are_switched_off(paths: RunPaths, state: str) -> None:
    seen = look(paths, state)
    assert (seen.state, seen.diagnosis) == (state, None), "that a machine is off today is not why it ended"
    assert seen.notes[-1].startswith(f"{state}, as seen before; tower, laptop, old cannot be asked now (they are off")
    assert store.read_object(paths.state_json)["state"] == state
    assert [event["what"] for event in event_log.lines(paths)] == [state]


def test_what_had_failed_keeps_its_cause(paths: RunPaths) -> None:
    why = Diagnosis(cause="disk-full", title="the disk of laptop is full", first_node="laptop", hint=Hint("make room"), retryable=False)
    diagnosis_store.keep(paths, 1, why, {})
    seen = look(paths, "failed")
    assert (seen.state, seen.diagnosis) == ("failed", why)


def test_a_run_that_trained_is_lost(paths: RunPaths) -> None:
    assert look(paths, "running").state == "lost"
    assert look(paths, "done", attempt=0).state == "lost", "an older attempt had ended"
