"""What is left of an attempt is ended everywhere before anything is started; what stands in the way of that is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.recover import halt, resume_guards
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.halt import Halted
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.run.claims import Claim, ClaimedRun
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
NAMES = list(builders.NAMES)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClaimedRun:
    monkeypatch.setattr(resume_guards, "refuse_edited_recipe", lambda *_: None)
    paths = builders.run_folder(tmp_path / "runs", plan=builders.plan())
    fleet = FakeFleet(tmp_path / "nodes").answer("checkpoints", {"good": [], "bad": {}, "run_known": True})
    return ClaimedRun(fleet, Claim(fleet, paths.name, "recovered", lambda: 0.0), paths, lambda text: None)


def halted(run: ClaimedRun, nodes: list[str] = NAMES, **more: Any) -> Halted:
    return halt.halt(
        run, Examination(1, "failed", None, more.pop("unreachable", {})), nodes=nodes, **{"from_scratch": "if-nothing-was-saved", **more}
    )


def fleet_of(run: ClaimedRun) -> FakeFleet:
    assert isinstance(run.fleet, FakeFleet)
    return run.fleet


def test_all_nodes_are_stopped_and_without_a_checkpoint_it_begins_again(run: ClaimedRun) -> None:
    assert halted(run) == Halted(NAMES, {}, ResumePoint(0, []))
    assert sorted(fleet_of(run).verbs("stop")) == sorted(NAMES)


def test_a_node_that_is_not_to_go_on_is_stopped_too(run: ClaimedRun) -> None:
    assert halted(run, ["tower"]).names == ["tower"]
    assert sorted(fleet_of(run).verbs("stop")) == sorted(NAMES)


def test_a_node_that_was_silent_is_not_asked(run: ClaimedRun) -> None:
    assert halted(run, unreachable={"laptop": "no route to host"}).names == ["tower", "oldtower"]
    assert "laptop" not in fleet_of(run).verbs("stop")


def test_a_node_that_falls_silent_now_is_left_out(run: ClaimedRun) -> None:
    fleet_of(run).nodes["laptop"].is_off = True
    assert halted(run).unreachable == {"laptop": "no route to host"}


def test_where_none_of_the_nodes_to_go_on_with_answers(run: ClaimedRun) -> None:
    fleet_of(run).nodes["laptop"].is_off = True
    with pytest.raises(UnreachableError, match="none of the remaining nodes answers: laptop"):
        halted(run, ["laptop"])


def test_a_process_that_does_not_end(run: ClaimedRun) -> None:
    fleet_of(run).answer("stop", {"asked": 1, "killed": 1, "left": [77], "as_nodes": []}, ["laptop"])
    with pytest.raises(HomelabError, match="did not end: 77"):
        halted(run)


def test_without_a_checkpoint_a_person_decides(run: ClaimedRun) -> None:
    with pytest.raises(HomelabError, match="no complete checkpoint"):
        halted(run, from_scratch="never")
