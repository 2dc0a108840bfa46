"""The whole supervisor of a run, over nodes that are folders: it hears their streams, asks their verbs, and writes down what it does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from homelab.controller.attempt import watchdog
from homelab.controller.base.errors import StoppedError
from homelab.controller.features.supervise import attempt_watch, leaving, step, supervision
from homelab.controller.run import event_log, leave, leave_folder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.controller.features.supervise.conftest import NAMES
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
HOLDER = {"run": builders.RUN, "token": "t", "by": "me", "doing": "recovered", "age_s": 1.0, "process": {}, "is_started": False}


def ends(fleet: FakeFleet, returncode: int) -> None:
    """From now on torchrun has ended so on both nodes."""
    for rank, name in enumerate(NAMES):
        over = builders.raw_end(returncode, rank=rank)
        fleet.nodes[name].streams["follow"] = [builders.raw_status(rank=rank), over]
        phase = over["ranks"][str(rank)]["phase"]
        ended: dict[str, Any] = {
            "exit": {"returncode": returncode, "ended_at": 999.0},
            "agent_alive": False,
            "torchrun_alive": False,
            "started_at": 900.0,
        }
        fleet.answer("poll", builders.raw_reply(name, rank=rank, step=1, phase=phase, **ended), [name])


def supervise(fleet: FakeFleet, paths: RunPaths, said: list[str] | None = None) -> str | None:
    return supervision.supervise(fleet.cluster, paths, (lambda text: None) if said is None else said.append)


def begun(fleet: FakeFleet, paths: RunPaths) -> Future[str | None]:
    """A supervisor at work, beside the test."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(supervise, fleet, paths)
    pool.shutdown(wait=False)
    return future


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < deadline, "it never comes"
        time.sleep(0.01)


def events(paths: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [line for line in event_log.lines(paths) if line["event"] == kind]


def written(paths: RunPaths) -> tuple[Any, Any]:
    return store.read_object(paths.supervisor_json).get("doing"), store.read_object(paths.state_json).get("state")


def test_a_run_that_ends_well(fleet: FakeFleet, paths: RunPaths) -> None:
    ends(fleet, 0)
    assert supervise(fleet, paths) == "done"
    assert written(paths) == ("ended", "done")
    assert events(paths, "trouble") == []
    assert fleet.verbs("stop", "claim") == []


def test_a_failure_is_examined_and_stopped_before_anything_is_decided(fleet: FakeFleet, paths: RunPaths) -> None:
    ends(fleet, 1)
    assert supervise(fleet, paths) == "given up"
    assert written(paths) == ("given up", "failed")
    assert [line["kind"] for line in events(paths, "trouble")] == ["exit"]
    assert "[recovery] auto is off" in events(paths, "given-up")[0]["because"]
    acts = [verb for _, verb in fleet.asked if verb in ("claim", "stop", "release")]
    assert acts == ["claim"] * 2 + ["stop"] * 2 + ["release"] * 2
    assert all(entry["token"] for node in fleet.nodes.values() for entry in node.requests if entry["verb"] == "stop"), (
        "in the name of the claim"
    )


def test_when_all_nodes_have_said_how_it_ended_nothing_more_is_waited_for(
    fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_watch, "SETTLE_S", 20.0)
    monkeypatch.setattr(attempt_watch, "SETTLE_MOST_S", 20.0)
    ends(fleet, 1)
    began_s = time.monotonic()
    assert supervise(fleet, paths) == "given up" and time.monotonic() - began_s < 10.0


def test_where_the_agent_was_killed_nobody_says_how_it_ended(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_watch, "SETTLE_MOST_S", 20.0)
    fleet.nodes["laptop"].streams["follow"] = [builders.raw_status(rank=1, agent="", torchrun="", state="")]
    began_s = time.monotonic()
    assert supervise(fleet, paths) == "given up" and time.monotonic() - began_s < 10.0
    assert [line["kind"] for line in events(paths, "trouble")] == ["dead-rank"]


def test_at_a_fault_only_metrics_come_that_are_not_here(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run has many megabytes of them."""
    monkeypatch.setattr(step, "FIRST_COLLECT_S", 0.0)
    monkeypatch.setattr(step, "COLLECT_S", 0.0)
    lines = [{"kind": "train", "time": 1.0, "attempt": 1, "rank": 0, "node": "tower", "step": 1, "loss": 1.0}]
    rank = {"heartbeat": {"time": 1.0, "phase": "training", "step": 1}, "metrics": lines, "metrics_end_bytes": 300}
    answer = {**builders.raw_reply("tower"), "run": {**builders.raw_reply("tower")["run"], "ranks": {"0": rank}}}
    asked: list[dict[str, Any]] = []
    at_the_fault = threading.Event()

    def poll(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        if len(asked) == 2:  # the look in which the fault comes: it still waits when the recovery asks
            assert at_the_fault.wait(30)
        if len(asked) == 3:
            at_the_fault.set()
        return answer

    fleet.answer("poll", poll, ["tower"])
    future = begun(fleet, paths)
    until(lambda: len(asked) == 2)
    for number, name in enumerate(NAMES):
        fleet.nodes[name].say(builders.raw_end(1, rank=number))
    assert future.result(30) == "given up"
    assert asked[2]["after_lines"]["0"] == 1 and asked[2]["after_bytes"] == {"0": 300} and asked[2]["lines_of_attempt"] == 1
    assert len(paths.metrics_jsonl.read_text().splitlines()) == 1, "and none is here twice"


def test_a_stop_by_hand_is_the_end(fleet: FakeFleet, paths: RunPaths) -> None:
    store.set_state(paths, "stopping", 1, intent="stopping")
    assert supervise(fleet, paths) == "stopped"
    assert written(paths)[0] == "ended"
    assert fleet.verbs("stop") == [], "whoever stops it does that"


def test_a_run_that_another_controller_has_recovered_is_left_alone(fleet: FakeFleet, paths: RunPaths) -> None:
    fleet.nodes["laptop"].streams["follow"] = [builders.raw_status(newest=2)]
    assert supervise(fleet, paths) == "superseded"
    assert fleet.verbs("stop", "claim") == []


def test_what_is_in_the_way_is_said_once_and_tried_again(fleet: FakeFleet, paths: RunPaths) -> None:
    holders = [HOLDER, HOLDER, HOLDER]
    ends(fleet, 1)
    fleet.answer("claim", lambda request: {"holder": holders.pop() if holders else None, "newest": 1}, ["laptop"])  # the first by name
    assert supervise(fleet, paths) == "given up"
    assert fleet.verbs("claim").count("laptop") == 4
    assert [line["message"] for line in events(paths, "waiting")] == ["this run is being recovered already"]
    assert len(events(paths, "trouble")) == 1, "it is one recovery"


def test_a_stop_on_another_machine_during_the_recovery(fleet: FakeFleet, paths: RunPaths) -> None:
    ends(fleet, 1)
    fleet.answer("claim", StoppedError("this run was stopped by hand", where="node laptop", hint="-"))
    assert supervise(fleet, paths) == "stopped"
    assert written(paths)[1] == "stopped"
    assert store.intent_of(paths, 1) == "stopped"


def test_a_node_that_is_cut_off_and_comes_back_changes_nothing(fleet: FakeFleet, paths: RunPaths) -> None:
    future = begun(fleet, paths)
    laptop = fleet.nodes["laptop"]
    until(lambda: bool(laptop.opened and fleet.nodes["tower"].opened))
    laptop.cut()
    ends(fleet, 0)
    laptop.is_off = False
    fleet.nodes["tower"].say(builders.raw_end(0))
    assert future.result(timeout=40) == "done"
    assert len(laptop.opened) == 2
    assert events(paths, "trouble") == []


def test_a_node_that_nobody_reaches_any_more_is_trouble(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "UNHEARD_S", 0.5)
    future = begun(fleet, paths)
    tower, laptop = fleet.nodes["tower"], fleet.nodes["laptop"]
    until(lambda: bool(laptop.opened and tower.opened))
    time.sleep(0.1)  # both have said their first word
    laptop.cut()

    def is_over() -> bool:
        tower.say(builders.raw_status(missing_s={"laptop": 30.0}))
        return future.done()

    until(is_over)
    assert future.result() == "given up"
    assert [(line["kind"], line["nodes"]) for line in events(paths, "trouble")] == [("silent-node", ["laptop"])]
    assert fleet.verbs("stop") == ["tower"]


def test_a_look_that_fails_does_not_end_the_supervision(fleet: FakeFleet, paths: RunPaths) -> None:
    def breaks(request: dict[str, Any]) -> Any:
        raise RuntimeError("a fault of ours")

    ends(fleet, 0)
    fleet.answer("poll", breaks)
    said: list[str] = []
    assert supervise(fleet, paths, said) == "done"
    assert any("looking failed: a fault of ours" in line for line in said)


def test_a_run_has_one_supervisor(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_LOCK_S", 0.1)
    with supervisor_lock.held(paths):
        assert supervise(fleet, paths) is None
    assert fleet.asked == []


def test_both_nodes_are_wanted_so_it_saves_and_waits_and_a_stop_ends_that(
    fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(Trainings that go on without a node are in tests/e2e/test_yield.py.)"""
    monkeypatch.setattr(leaving, "LOOK_S", 0.01)
    saved: list[str] = []

    def saves(request: dict[str, Any]) -> dict[str, Any]:
        saved.append(request["node"])
        for rank, name in enumerate(NAMES):
            fleet.nodes[name].say(builders.raw_status(rank=rank, step=8, checkpoint=8))
        return {}

    law = builders.recipe()
    store.write_json(paths.run_json, store.read_object(paths.run_json) | {"recipe": law.model_dump(mode="json", exclude_unset=True)})
    fleet.answer("save", saves)
    future = begun(fleet, paths)
    until(lambda: all(node.opened for node in fleet.nodes.values()))
    for name in NAMES:
        leave_folder.write(paths.root.parent, leave.Leave(node=name, since=time.time()))
    until(lambda: bool(events(paths, "waiting")))
    assert len(saved) == 1, "one node is asked, and its ranks tell the others"

    def whole_stops() -> list[str]:
        """Nodes on which also what waits for the next attempt is ended: a recovery's own stop has a token, and spares it."""
        return sorted(name for name in NAMES for one in fleet.nodes[name].requests if one["verb"] == "stop" and not one.get("token"))

    until(lambda: whole_stops() == sorted(NAMES))
    asked = len(fleet.asked)
    assert [line["kind"] for line in events(paths, "restart")] == ["leave"] and not events(paths, "trouble")
    assert sorted(line["node"] for line in events(paths, "given-back")) == sorted(NAMES)
    time.sleep(0.3)
    assert len(fleet.asked) == asked, "nobody disturbs the owners"
    assert len(events(paths, "waiting")) == 1
    assert store.read_object(paths.supervisor_json)["restarts"] == []
    store.set_state(paths, "stopping", 1, intent="stopping")
    assert future.result(timeout=20) == "stopped"
