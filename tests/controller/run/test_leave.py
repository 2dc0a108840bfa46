"""When a leave is over, whatever the clock does; what the events tell of leaves; and the folder of the wishes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import BusyError
from homelab.controller.run import leave, leave_folder
from homelab.controller.run.events import event, given_back
from homelab.controller.run.leave import Away, Leave, LeaveClock, LeaveTimes
from homelab.shared.protocol.house_messages import House, HouseSign
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
TYPED = 1_800_000_000.0
HOUR_S = 3600.0
TWO_HOURS = Leave(node="tower", since=TYPED, until=TYPED + 2 * HOUR_S, for_s=2 * HOUR_S)
UNTIL = Leave(node="tower", since=TYPED, until=TYPED + 2 * HOUR_S)


def lasts(clock: LeaveClock, one: Leave, now: float, now_s: float) -> bool:
    return "tower" in clock.lasting([one], now, now_s)


@pytest.mark.parametrize("jump_s", [0.0, 90 * 60.0, -90 * 60.0, 400 * 24 * HOUR_S, -400 * 24 * HOUR_S])
def test_two_hours_are_two_hours_for_whoever_has_seen_them_begin(jump_s: float) -> None:
    clock = LeaveClock()
    assert lasts(clock, TWO_HOURS, TYPED + 1.0, 50.0)
    assert lasts(clock, TWO_HOURS, TYPED + HOUR_S + jump_s, 50.0 + HOUR_S)
    assert lasts(clock, TWO_HOURS, TYPED + 2 * HOUR_S + jump_s - 3.0, 50.0 + 2 * HOUR_S - 3.0)
    assert not lasts(clock, TWO_HOURS, TYPED + 2 * HOUR_S + jump_s, 50.0 + 2 * HOUR_S)
    assert not lasts(clock, TWO_HOURS, TYPED + jump_s, 50.0 + 2 * HOUR_S + 1.0), "over is over"


def test_whoever_looks_later_takes_what_is_left_and_never_more_than_all() -> None:
    clock = LeaveClock()
    assert lasts(clock, TWO_HOURS, TYPED + HOUR_S, 0.0) and not lasts(clock, TWO_HOURS, TYPED, HOUR_S)
    assert not lasts(LeaveClock(), TWO_HOURS, TYPED + 2 * HOUR_S, 0.0)
    late = LeaveClock()  # the clock was set back by a day, and the supervisor was started again
    assert lasts(late, TWO_HOURS, TYPED - 24 * HOUR_S, 0.0) and not lasts(late, TWO_HOURS, TYPED - 22 * HOUR_S, 2 * HOUR_S)


def test_a_time_of_day_is_that_of_the_clock_also_if_it_is_set() -> None:
    clock = LeaveClock()
    assert lasts(clock, UNTIL, TYPED, 0.0) and not lasts(clock, UNTIL, TYPED + 2 * HOUR_S, 1.0)
    assert lasts(clock, UNTIL, TYPED + HOUR_S, 9e9)


def test_a_second_wish_takes_the_place_of_the_first_and_back_ends_both() -> None:
    clock, longer = LeaveClock(), TWO_HOURS.model_copy(update={"until": TYPED + 4 * HOUR_S, "for_s": 3 * HOUR_S})
    assert lasts(clock, TWO_HOURS, TYPED, 0.0)
    assert lasts(clock, longer, TYPED + HOUR_S, HOUR_S) and lasts(clock, longer, TYPED + 3 * HOUR_S, 3 * HOUR_S)
    assert not lasts(clock, longer, TYPED + 4 * HOUR_S, 4 * HOUR_S)
    open_end = Leave(node="tower", since=TYPED)
    assert lasts(clock, open_end, TYPED + 999 * HOUR_S, 1e9)
    assert not lasts(clock, open_end.model_copy(update={"is_back": True}), TYPED, 0.0)


def told(*events: tuple[float, Any]) -> list[dict[str, Any]]:
    return [{"time": time_s, **one.line()} for time_s, one in events]


LIFE = told(
    (0.0, event("attempt-started", 1)),
    (100.0, given_back(1, "tower", "23:00")),
    (110.0, event("attempt-resumed", 2, step=9, nodes=["laptop"])),
    (150.0, given_back(2, "tower", "23:30")),
    (400.0, event("came-back", 2, node="tower")),
    (410.0, event("attempt-resumed", 3, step=19, nodes=["laptop", "tower"])),
    (900.0, given_back(3, "tower", "")),
)


def test_the_events_tell_who_is_away_and_for_how_long() -> None:
    assert leave.lasting(LIFE[:2]) == {"tower": Away("23:00")} and leave.lasting(LIFE[:4]) == {"tower": Away("23:30")}
    assert leave.lasting(LIFE[:5]) == {} and leave.lasting(LIFE) == {"tower": Away()}
    by_itself = told((950.0, given_back(3, "tower", "07:00", leave.HOURS)))
    assert leave.lasting(LIFE + by_itself) == {"tower": Away("07:00", leave.HOURS)}
    assert by_itself[0]["what"] == "tower was given back to its owner until 07:00: it is outside its hours"
    assert leave.lent(LIFE[:5]) == {"tower"}, "its leave is over, and it does not train yet"
    assert leave.lent(LIFE[:6]) == set()
    assert leave.times(LIFE, 1440.0) == {"tower": LeaveTimes(2, 300.0 + 540.0)}
    assert leave.times_words("tower", LeaveTimes(2, 840.0)) == "tower was given back 2 times, 0 h 14 min"
    assert leave.times_words("tower", LeaveTimes(1, 7800.0)) == "tower was given back once, 2 h 10 min"


def test_a_clock_that_was_set_back_makes_no_negative_leave() -> None:
    assert leave.times(told((500.0, given_back(1, "tower", "")), (100.0, event("came-back", 1, node="tower"))), 0.0)["tower"].seconds == 0.0


def test_a_move_for_the_house_is_no_restart() -> None:
    lines = told(*((0.0, event("restart", 1, because="it was so", kind=kind)) for kind in ("leave", "return", "rejoin", "recut")))
    assert leave.moves(lines) == 2


def test_a_run_waits_until_its_next_attempt() -> None:
    waits = told((1.0, event("attempt-started", 1)), (2.0, event("waiting", 1, message="no node is left")))
    assert leave.is_waiting(waits) and not leave.is_waiting(waits[:1])
    assert not leave.is_waiting([*waits, *told((3.0, event("attempt-resumed", 2, step=1)))])


def test_a_wish_is_kept_beside_the_runs_and_a_file_that_is_half_there_changes_nothing(tmp_path: Path) -> None:
    now = time.time()
    one = Leave(node="tower", since=now, until=now + 60.0)
    assert leave_folder.read(tmp_path) == {}
    leave_folder.write(tmp_path, one)
    assert leave_folder.lasting(tmp_path) == leave_folder.read(tmp_path) == {"tower": one}
    (tmp_path / leave_folder.NAME / "tower.json").write_text('{"node": "tow')
    assert leave_folder.read(tmp_path, {"tower": one}) == {"tower": one} and leave_folder.read(tmp_path) == {}
    (tmp_path / leave_folder.NAME / "tower.json").write_text('{"node": "laptop", "since": 1.0}')
    assert leave_folder.read(tmp_path) == {}, "a file speaks for the node of its name"


def test_a_launch_does_not_take_a_node_that_is_with_its_owner(tmp_path: Path) -> None:
    fleet, runs = FakeFleet(tmp_path, ("tower", "laptop")), tmp_path / "runs"
    leave_folder.write(runs, Leave(node="tower", since=time.time()))
    leave_folder.refuse(fleet, runs, ["laptop"], "launch RECIPE")
    with pytest.raises(BusyError) as raised:
        leave_folder.refuse(fleet, runs, ["laptop", "tower"], "launch RECIPE")
    assert "tower was given back to its owner" in raised.value.message
    assert "homelab launch RECIPE --nodes laptop" in raised.value.hint and "homelab yield tower --back" in raised.value.hint
    with pytest.raises(BusyError) as raised:
        leave_folder.refuse(fleet, runs, ["tower"], "launch RECIPE")
    assert raised.value.hint == "homelab yield tower --back"
    assert fleet.verbs("house") == ["laptop", "laptop"], "whoever was given away by hand is not asked"


def test_nor_one_whose_owner_is_there_or_that_is_outside_its_hours(tmp_path: Path) -> None:
    nodes = {"tower": {"hours": "23:00-07:00"}, "laptop": {"yield_to": ("steam",)}}
    fleet, runs = FakeFleet(tmp_path, cluster=builders.cluster(("tower", "laptop", "oldtower"), nodes=nodes)), tmp_path / "runs"
    fleet.answer("house", House(minute=12 * 60))
    fleet.answer("house", House(minute=0, signs=(HouseSign(kind="program", name="steam", pid=7),)), ["laptop"])
    with pytest.raises(BusyError) as raised:
        leave_folder.refuse(fleet, runs, ["tower", "laptop", "oldtower"], "launch RECIPE")
    said = "tower was given back to its owner until 23:00: it is outside its hours; laptop was given back to its owner: steam runs there"
    assert raised.value.message == said and "homelab launch RECIPE --nodes oldtower" in raised.value.hint
    assert [request["yield_to"] for request in fleet.nodes["laptop"].requests] == [["steam"]]
    back = Leave(node="laptop", since=time.time(), is_back=True, against=("program:steam",))
    leave_folder.write(runs, back)
    leave_folder.refuse(fleet, runs, ["laptop", "oldtower"], "launch RECIPE")
    leave_folder.write(runs, back.model_copy(update={"since": time.time() - 3 * 86400}))
    with pytest.raises(BusyError, match="steam runs there"):  # it may have gone and come since, with nobody to see it
        leave_folder.refuse(fleet, runs, ["laptop", "oldtower"], "launch RECIPE")
    fleet.answer("house", House(minute=0, signs=(HouseSign(kind="asked"),)), ["laptop"])
    with pytest.raises(BusyError, match="somebody at the machine asked for it"):
        leave_folder.refuse(fleet, runs, ["laptop"], "launch RECIPE")
    fleet.nodes["laptop"].is_off = True
    leave_folder.refuse(fleet, runs, ["laptop"], "launch RECIPE")  # preflight says that it does not answer
