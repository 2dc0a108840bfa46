"""Nodes that may come back: what they and the others are asked before, and who is left in peace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.supervise import rejoin
from homelab.controller.features.supervise.recovery_try import Supervised
from homelab.controller.features.supervise.rejoin import RejoinMonitor
from homelab.controller.run import event_log
from homelab.controller.run.paths import RunPaths
from scripts.practice.desk import wait_until
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)


def run_of(folder: Path, **recovery: bool) -> Supervised:
    return Supervised(builders.cluster(), RunPaths(folder / builders.RUN), builders.recipe(recovery=recovery), [], ())


def test_a_node_that_is_with_its_owner_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    looks: list[str] = []
    away = {"tower"}

    def is_well(self: RejoinMonitor, names: tuple[str, ...]) -> bool:
        asked.append(names)
        return True

    def is_away(name: str) -> bool:
        looks.append(name)
        return name in away

    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(RejoinMonitor, "_is_well", is_well)
    with RejoinMonitor(run_of(tmp_path, standby=False), ["tower"], ["laptop"], is_away) as monitor:
        wait_until(lambda: len(looks) > 5, 10.0)
        assert asked == [] and not monitor.well
        away.clear()
        wait_until(lambda: monitor.well == {"tower"}, 10.0)
        away.add("tower")
        wait_until(lambda: not monitor.well, 10.0)


def test_all_nodes_are_prepared_before_one_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may have begun their attempt a moment ago."""
    fleet = FakeFleet(tmp_path / "nodes").replace_connections(monkeypatch)
    states = dict.fromkeys(builders.NAMES, "begun")

    def prepared(request: dict[str, Any]) -> dict[str, Any]:
        return {"state": states[request["node"]]}

    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(rejoin, "_LOOK_S", 0.01)
    monkeypatch.setattr(RejoinMonitor, "_is_well", lambda *_: True)
    tower, laptop, *_ = builders.NAMES
    with RejoinMonitor(run_of(tmp_path), [tower], [laptop]) as monitor:
        fleet.answer("prepare", prepared)
        wait_until(lambda: fleet.verbs("prepare").count(laptop) > 2, 10.0)
        states[tower] = "ready"
        asked = len(fleet.asked)
        wait_until(lambda: len(fleet.asked) > asked + 4, 10.0)
        assert not monitor.well
        states[laptop] = "none"  # it has not the memory: it begins slower
        wait_until(lambda: monitor.well == {tower}, 10.0)
        asked = len(fleet.asked)
        wait_until(lambda: len(fleet.asked) > asked + 4, 10.0)
        assert set(fleet.verbs("prepare")[-3:]) == {tower}, "what waits there is kept; the others keep theirs by themselves"
        assert fleet.nodes[tower].requests[-1]["run"] == builders.RUN


@pytest.mark.parametrize("answer", [{"state": "begun"}, HomelabError("the lock is kept")])
def test_one_that_cannot_be_prepared_comes_back_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    FakeFleet(tmp_path / "nodes").replace_connections(monkeypatch).answer("prepare", answer)
    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(rejoin, "PREPARE_S", 0.2)
    monkeypatch.setattr(RejoinMonitor, "_is_well", lambda *_: True)
    tower, laptop, *_ = builders.NAMES
    with RejoinMonitor(run_of(tmp_path), [tower], [laptop]) as monitor:
        wait_until(lambda: monitor.well == {tower}, 10.0)


def test_one_that_dies_while_it_is_prepared_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would end their attempt for it."""
    tower, laptop, *_ = builders.NAMES
    fleet = FakeFleet(tmp_path / "nodes").replace_connections(monkeypatch)
    asked: list[str] = []

    def prepared(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request["node"])
        fleet.nodes[tower].is_off = True
        return {"state": "ready"}

    fleet.answer("prepare", prepared, [laptop])
    fleet.answer("prepare", UnreachableError("it is off", where=f"node {tower}", hint=""), [tower])
    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(RejoinMonitor, "_is_well", lambda *_: True)
    with RejoinMonitor(run_of(tmp_path), [tower], [laptop]) as monitor:
        wait_until(lambda: len(asked) > 2, 10.0)
        assert not monitor.well


def test_what_this_machine_lacks_for_a_moment_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes, or room on its disk: the thread that asks must not end by it."""
    faults: list[Exception] = [BlockingIOError("no processes"), RuntimeError("can't start new thread")]

    def is_well(*_: object) -> bool:
        if faults:
            raise faults.pop()
        return True

    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(RejoinMonitor, "_is_well", is_well)
    run = run_of(tmp_path, standby=False)
    with RejoinMonitor(run, ["tower"], ["laptop"]) as monitor:
        wait_until(lambda: monitor.well == {"tower"}, 10.0)
    assert [line["text"].split(": ")[0] for line in event_log.lines(run.paths)] == ["tower could not be asked whether it is well again"] * 2
