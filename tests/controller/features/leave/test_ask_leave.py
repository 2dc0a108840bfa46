"""`homelab yield` without a training: what is typed, who is told, and what it says to whom nothing can be done for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.leave import ask_leave
from homelab.controller.features.leave.ask_leave import Left
from homelab.controller.run import event_log, events, leave_folder, store, supervisor_lock, supervisor_record
from homelab.controller.run.leave import Leave
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.house_messages import House, HouseSign
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
NAMES = ("tower", "laptop")
PLAN = builders.plan([builders.rank_plan(number, name) for number, name in enumerate(NAMES)])


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    return FakeFleet(tmp_path / "nodes", NAMES).replace_connections(monkeypatch)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that trains on both nodes."""
    folder = builders.run_folder(tmp_path / "runs", plan=PLAN)
    store.set_state(folder, "running", 1)
    store.write_json(folder.supervisor_json, {"wanted": False})
    return folder


def on_node(run: str) -> dict[str, Any]:
    """What a node says of a run that trains there."""
    return {"name": run, "created_at": 9.0, "attempt": 1, "alive": True, "exit": None, "final": False, "busy": ""}


def say(text: str) -> None:
    """Nobody reads it."""


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200.0), ("90min", 5400.0), ("90m", 5400.0), ("1h30min", 5400.0), ("1h 30m", 5400.0), ("0.5H", 1800.0), ("1d", 86400.0), ("20s", 20.0)]
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert ask_leave.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "two hours", "2h?", "-2h", "0h", "999999d", "1h;rm", "nan h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InputError, match="is no duration"):
        ask_leave.duration_s(text)


def test_a_wish_has_one_end_and_a_time_of_day_is_the_next_one() -> None:
    now = time.mktime((2026, 11, 26, 22, 0, 0, 0, 0, -1))
    assert ask_leave.wish("tower", "", "", now) == Leave(node="tower", since=now)
    assert ask_leave.wish("tower", "2h", "", now) == Leave(node="tower", since=now, until=now + 7200.0, for_s=7200.0)
    assert ask_leave.wish("tower", "", "23:00", now) == Leave(node="tower", since=now, until=now + 3600.0)
    for too_late in ("21:59", "22:00"):
        until = ask_leave.wish("tower", "", too_late, now).until
        assert until is not None and 23.9 * 3600 < until - now <= 24 * 3600.0
    with pytest.raises(InputError, match="two ends are named"):
        ask_leave.wish("tower", "2h", "23:00", now)
    with pytest.raises(InputError, match="is no time of day"):
        ask_leave.wish("tower", "", "25:00", now)


def test_an_unknown_node_and_one_that_is_with_nobody(fleet: FakeFleet, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'no node is called "towr"\. Did you mean "tower"'):
        ask_leave.refuse_unknown("towr", NAMES, tmp_path / "cluster.toml")
    with pytest.raises(InputError, match="there is nothing to take back"):
        ask_leave.take_back(fleet, tmp_path / "runs", "tower")


def test_a_node_that_no_run_uses_is_free_at_once(fleet: FakeFleet, paths: RunPaths) -> None:
    store.set_state(paths, "done", 1)
    left = ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)
    assert ask_leave.lines(left, time.time()) == ["tower is free; no run uses it"]
    assert fleet.asked == [("tower", "runs")], "a run of another folder may be on it"
    back = ask_leave.take_back(fleet, paths.root.parent, "tower")
    assert ask_leave.lines(back, time.time()) == ["tower was taken back; no run waits for it"]
    assert leave_folder.lasting(paths.root.parent) == {}


def test_a_run_of_another_folder_is_named_with_the_way_out(fleet: FakeFleet, paths: RunPaths) -> None:
    store.set_state(paths, "done", 1)
    runs_dir, one = paths.root.parent, ask_leave.wish("tower", "", "", time.time())
    fleet.answer("runs", {"runs": [on_node("2026-01-01-0000-of-another-folder")]})
    with pytest.raises(HomelabError, match="2026-01-01-0000-of-another-folder is at work on tower") as refused:
        ask_leave.give_back(fleet, runs_dir, one, say)
    assert "homelab yield tower --runs-dir DIR" in refused.value.hint and "/tower/yield" in refused.value.hint
    assert leave_folder.lasting(runs_dir) == {}, "nobody would read it"
    fleet.answer("runs", {"runs": [on_node(paths.name), {**on_node("old"), "alive": False}]})
    assert ask_leave.lines(ask_leave.give_back(fleet, runs_dir, one, say), time.time()) == ["tower is free; no run uses it"]


def test_back_against_what_the_node_says_by_itself(fleet: FakeFleet, paths: RunPaths) -> None:
    runs_dir = paths.root.parent
    fleet.answer("house", House(minute=0, signs=(HouseSign(kind="program", name="steam", pid=7),)))
    event_log.append(paths, events.given_back(1, "tower", "", "steam runs there"))
    with supervisor_lock.held(paths):
        back = ask_leave.take_back(fleet, runs_dir, "tower")
    assert ask_leave.lines(back, 0.0) == [
        f"tower was taken back: {paths.name} saves, and goes on with it as soon as it is healthy",
        "this counts no more until it is over once: steam runs there",
    ]
    assert back.as_dict()["overridden"] == ["steam runs there"]
    kept = leave_folder.read(runs_dir)["tower"]
    assert kept.is_back and kept.against == ("program:steam",)
    leave_folder.refuse(fleet, runs_dir, ["tower"], "launch RECIPE")


def test_back_against_what_is_on_the_card(fleet: FakeFleet, paths: RunPaths) -> None:
    """The node tells a stranger there from its own processes by what a run has found on the card."""

    def said(request: dict[str, Any]) -> House:
        return House(minute=0, signs=(HouseSign(kind="card", name="blender", pid=7),) if request.get("run") == paths.name else ())

    fleet.answer("house", said)
    left = ask_leave.take_back(fleet, paths.root.parent, "laptop")
    assert leave_folder.read(paths.root.parent)["laptop"].against == ("card:blender",) and len(left.overridden) == 1


def test_back_while_nothing_is_seen_any_more(fleet: FakeFleet, paths: RunPaths) -> None:
    """In the ten minutes after a game."""
    event_log.append(paths, events.given_back(1, "tower", "", "steam runs there"))
    with supervisor_lock.held(paths):
        back = ask_leave.take_back(fleet, paths.root.parent, "tower")
    assert len(ask_leave.lines(back, 0.0)) == 1 and leave_folder.read(paths.root.parent)["tower"].against == ()


def test_twice_is_one_leave_with_another_end(fleet: FakeFleet, tmp_path: Path) -> None:
    now = time.time()
    ask_leave.give_back(fleet, tmp_path, ask_leave.wish("tower", "2h", "", now - 100.0), say)
    ask_leave.give_back(fleet, tmp_path, ask_leave.wish("tower", "", "", now), say)
    assert leave_folder.lasting(tmp_path)["tower"] == Leave(node="tower", since=now - 100.0)


def test_a_run_that_was_left_unfinished_uses_nothing(fleet: FakeFleet, paths: RunPaths) -> None:
    """Its machines were switched off, months ago."""
    fleet.answer("supervisor-look", {"supervisor": None, "owner": {}})
    store.write_json(paths.supervisor_json, {"wanted": True, "doing": "watching"})
    began_s = time.monotonic()
    left = ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)
    assert ask_leave.lines(left, time.time()) == ["tower is free; no run uses it"] and time.monotonic() - began_s < 5.0


def test_a_run_without_a_supervisor_says_what_to_type(fleet: FakeFleet, paths: RunPaths) -> None:
    fleet.answer("supervisor-look", {"supervisor": None, "owner": {}})
    run = paths.name
    fleet.answer("runs", {"runs": [on_node(run)]})
    with pytest.raises(HomelabError) as raised:
        ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)
    assert f"{run} has no supervisor here that could leave tower" in raised.value.message
    for command in (f"homelab supervise {run}", f"homelab stop {run}", f"homelab recover {run} --nodes laptop"):
        assert command in raised.value.hint
    assert "tower" in leave_folder.lasting(paths.root.parent), "no later run takes it"


def test_a_launch_that_is_stopped_is_not_waited_for_without_end(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z: its process lives, and will leave no supervisor."""
    monkeypatch.setattr(ask_leave, "_LOOK_S", 0.01)
    monkeypatch.setattr(ask_leave, "FREE_S", 0.2)
    supervisor_record.record_holder(paths, supervisor_record.LAUNCHING, wants_supervisor=True)
    fleet.answer("supervisor-look", {"supervisor": None, "owner": {}})
    with pytest.raises(HomelabError, match="has no supervisor here that could leave tower"):
        ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)


def test_a_supervisor_that_is_on_its_way_is_waited_for(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch has just ended: nobody holds the run for an instant."""
    monkeypatch.setattr(ask_leave, "_LOOK_S", 0.01)
    store.write_json(paths.supervisor_json, {"wanted": True})
    fleet.answer("supervisor-look", {"supervisor": None, "owner": {}})
    fleet.answer("runs", {"runs": [on_node(paths.name)]})
    looks = iter([False] * 8)
    monkeypatch.setattr(supervisor_lock, "is_held", lambda _: next(looks, True))
    event_log.append(paths, events.given_back(1, "tower", ""))
    event_log.append(paths, events.event("waiting", 1, message="no other node is left"))
    assert ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say).goes_on == {paths.name: ()}


def test_a_supervisor_on_a_node_is_sent_the_wish(fleet: FakeFleet, paths: RunPaths) -> None:
    store.write_json(paths.supervised_json, {"node": "tower"})
    at_work = {"alive": True, "frozen": False, "pid": 7, "doing": "watching", "why": "", "events": []}
    fleet.answer("supervisor-look", {"supervisor": at_work, "owner": {}})
    left = ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("laptop", "2h", "", time.time()), say)
    assert left.elsewhere == {paths.name: "tower"} and left.goes_on == {}
    there = fleet.nodes["tower"].workdir / "supervised" / paths.name / "runs"
    assert leave_folder.read(there) == leave_folder.read(paths.root.parent) != {}, "where that supervisor looks"
    assert "the supervisor of" in ask_leave.lines(left, time.time())[1]
    ask_leave.take_back(fleet, paths.root.parent, "laptop")
    assert leave_folder.lasting(there) == {}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(ask_leave, "FREE_S", 0.3)
    monkeypatch.setattr(ask_leave, "_LOOK_S", 0.01)
    return lambda: None


def test_a_node_that_does_not_become_free(fleet: FakeFleet, paths: RunPaths, quick: object) -> None:
    with supervisor_lock.held(paths), pytest.raises(HomelabError, match="tower is not free yet"):
        ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)


def test_a_run_that_waits_says_so(fleet: FakeFleet, paths: RunPaths, quick: object) -> None:
    event_log.append(paths, events.given_back(1, "tower", ""))
    event_log.append(paths, events.event("waiting", 1, message="no other node is left"))
    with supervisor_lock.held(paths):
        left = ask_leave.give_back(fleet, paths.root.parent, ask_leave.wish("tower", "", "", time.time()), say)
        assert ask_leave.lines(left, 0.0) == ["tower is free", f"{paths.name} is saved, and waits for tower"]
        back = ask_leave.take_back(fleet, paths.root.parent, "tower")
    assert ask_leave.lines(back, 0.0) == [f"tower was taken back: {paths.name} saves, and goes on with it as soon as it is healthy"]


def test_the_answer_of_one_that_goes_on() -> None:
    left = Left("tower", Leave(node="tower", since=0.0), {"night": ("laptop", "oldtower")}, {})
    assert ask_leave.lines(left, 0.0) == ["tower is free", "night goes on on laptop and oldtower"]
    assert left.as_dict() == {
        "node": "tower",
        "given_back": True,
        "until": None,
        "runs": {"night": ["laptop", "oldtower"]},
        "supervised_on": {},
        "overridden": [],
    }
