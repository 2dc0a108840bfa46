"""A stop by hand: every node is asked, and what could not be asked is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_UNREACHABLE
from homelab.controller.features.stop import stop
from homelab.controller.run import run_folder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def fleet(tmp_path: Path) -> FakeFleet:
    return FakeFleet(tmp_path / "nodes")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = builders.run_folder(tmp_path / "runs", plan=builders.plan())
    store.set_state(paths, "running", 1)
    return paths


def ended(**changes: object) -> dict[str, object]:
    return {"asked": 0, "killed": 0, "left": [], "as_nodes": [], **changes}


def test_nodes_on_which_nothing_ran_are_verified(fleet: FakeFleet, paths: RunPaths) -> None:
    outcome = stop.stop(fleet, paths, lambda text: None)
    assert outcome.exit_code == EXIT_DONE
    assert outcome.lines() == [f"{name}: nothing was running; verified" for name in builders.NAMES]
    assert store.read_object(paths.state_json)["state"] == "stopped"


def test_a_node_that_is_off_may_still_run_it(fleet: FakeFleet, paths: RunPaths) -> None:
    fleet.nodes["laptop"].is_off = True
    outcome = stop.stop(fleet, paths, lambda text: None)
    assert outcome.exit_code == EXIT_UNREACHABLE
    assert (
        outcome.lines()[-1]
        == f"laptop: could not be asked (no route to host); it may still be running. When it is back: homelab stop {paths.name}"
    )
    assert store.read_object(paths.state_json)["state"] == "stopping", "it is not known to be over"


def test_what_does_not_end_is_named(fleet: FakeFleet, paths: RunPaths) -> None:
    fleet.answer("stop", ended(asked=2, left=[77]), ["tower"])
    outcome = stop.stop(fleet, paths, lambda text: None)
    assert outcome.exit_code == EXIT_FAILED
    assert outcome.left == {"tower": [77]}


def test_a_supervisor_that_still_tries_hears_of_the_stop_of_a_run_that_looks_failed(fleet: FakeFleet, paths: RunPaths) -> None:
    """A look, and a start that did not come to its end, write "failed" while it waits for nodes; that start has left a plan of its own."""
    store.set_state(paths, "failed", 1)
    with supervisor_lock.held(paths):
        stop.stop(fleet, paths, lambda text: None)
    assert run_folder.is_stopped(paths, 1) and store.read_object(paths.state_json)["state"] == "stopped"
    store.set_state(paths, "stopped", 2, intent="stopped")
    assert run_folder.is_stopped(paths, 1) and run_folder.is_stopped(paths, 2) and not run_folder.is_stopped(paths, 3)


def test_a_run_that_has_failed_and_is_over_stays_failed(fleet: FakeFleet, paths: RunPaths) -> None:
    store.set_state(paths, "failed", 1)
    stop.stop(fleet, paths, lambda text: None)
    assert store.read_object(paths.state_json)["state"] == "failed" and not run_folder.is_stopped(paths, 1)


def test_a_run_that_was_done_stays_done(fleet: FakeFleet, paths: RunPaths) -> None:
    store.set_state(paths, "done", 1)
    assert stop.stop(fleet, paths, lambda text: None).was_done
    assert store.read_object(paths.state_json)["state"] == "done"
