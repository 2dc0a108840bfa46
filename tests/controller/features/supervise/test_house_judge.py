"""Whether a node is its owner's, in simulated time: what lasts counts, what has gone for long is gone, and a clock that is set counts for nothing."""

from __future__ import annotations

import itertools

import pytest

from homelab.controller.base import daily_hours
from homelab.controller.features.supervise.house_judge import DEAF_S, QUIET_S, STAYS_S, HouseJudge
from homelab.controller.run.leave import HOURS, Away
from homelab.shared.protocol.house_messages import House, HouseSign

pytestmark = pytest.mark.timeout(30)
STEAM = HouseSign(kind="program", name="steam", pid=70)
ASKED = HouseSign(kind="asked")
STEAMING = Away("", "steam runs there")
NIGHT = daily_hours.spans("23:00-07:00")


class Time:
    """A judge, and the seconds that have passed for it. The node says something every second."""

    def __init__(self, judge: HouseJudge | None = None) -> None:
        self.judge, self.now_s = judge or HouseJudge((), QUIET_S), 1000.0

    def passes(self, seconds: float, *signs: HouseSign, minute: int = 720) -> list[Away | None]:
        """What it says after each second in which the node sees these signs."""
        said = []
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.judge.see(House(minute=minute, signs=signs), self.now_s)
            said.append(self.judge.away)
        return said


def test_a_sign_that_lasts_two_seconds_counts() -> None:
    time = Time()
    assert time.passes(60) == [None] * 60
    assert time.passes(4, STEAM) == [None, None, STEAMING, STEAMING] and STAYS_S == 2.0


def test_it_comes_back_when_the_sign_was_gone_for_ten_minutes() -> None:
    time = Time()
    time.passes(3, STEAM)
    assert set(time.passes(QUIET_S)) == {STEAMING}, "nine minutes and 59 seconds after the first look without it"
    assert time.passes(1) == [None]
    assert time.passes(3, STEAM)[-1] == STEAMING, "whoever comes again has it again at once"


def test_a_sign_in_between_begins_the_ten_minutes_anew() -> None:
    time = Time()
    time.passes(3, STEAM)
    assert set(time.passes(QUIET_S - 10) + time.passes(1, STEAM) + time.passes(QUIET_S)) == {STEAMING}
    assert time.passes(1) == [None]


def test_a_program_that_comes_and_goes_every_second_moves_nobody() -> None:
    time = Time()
    for pid in range(2000):
        assert time.passes(1, HouseSign(kind="program", name="steam", pid=pid)) == [None]
        if pid % 3 == 0:
            assert time.passes(1) == [None]
    time.passes(3, STEAM)
    for pid in range(2000):
        assert set(time.passes(1, HouseSign(kind="program", name="steam", pid=pid)) + time.passes(1)) == {STEAMING}


@pytest.mark.parametrize(("on_s", "off_s"), [(5, 5), (30, 60), (100, 500), (3, QUIET_S - 2), (3, QUIET_S + 30)])
def test_it_never_comes_back_more_often_than_every_ten_minutes(on_s: float, off_s: float) -> None:
    time = Time()
    returns = [one is None for _ in range(30) for one in time.passes(on_s, STEAM) + time.passes(off_s)]
    changes = [second for second in range(1, len(returns)) if returns[second] and not returns[second - 1]]
    assert all(later - before >= QUIET_S for before, later in itertools.pairwise(changes))
    assert len(changes) <= len(returns) / QUIET_S


@pytest.mark.parametrize("minute", [0, 719, 1439])
def test_a_clock_of_the_node_that_jumps_changes_nothing(minute: int) -> None:
    time = Time()
    time.passes(1, STEAM)
    assert time.passes(2, STEAM, minute=minute)[-1] == STEAMING
    assert set(time.passes(QUIET_S / 2) + time.passes(QUIET_S / 2, minute=minute)) == {STEAMING} and time.passes(1) == [None]


def test_a_line_that_is_read_twice_is_one_look() -> None:
    time = Time()
    time.passes(1, STEAM)
    for _ in range(100):  # the supervisor looks five times a second, and the node has gone silent
        time.judge.see(House(minute=0, signs=(STEAM,)), time.now_s)
    assert time.judge.away is None


def test_whoever_was_not_heard_may_have_come_and_gone() -> None:
    time = Time()
    time.passes(1, STEAM)
    time.now_s += DEAF_S + 1.0
    assert time.passes(1, STEAM) == [None]
    assert time.passes(3, STEAM)[-1] == STEAMING
    time.passes(QUIET_S - 100)
    time.now_s += 3600.0
    assert set(time.passes(QUIET_S)) == {STEAMING}


def test_the_file_of_a_person_is_exact() -> None:
    time = Time()
    assert time.passes(1, ASKED) == [Away("", "somebody at the machine asked for it")]
    assert time.passes(1) == [None], "no ten minutes after it is removed"
    time.passes(3, ASKED, STEAM)
    assert time.passes(1)[0] is not None, "but a game that ran meanwhile is waited for"


def test_hours_are_exact_and_a_game_in_the_hours_counts() -> None:
    time = Time(HouseJudge(NIGHT, QUIET_S))
    day, night = 12 * 60, 23 * 60
    assert time.passes(1, minute=day) == [Away("23:00", HOURS)] and time.passes(1, minute=night) == [None]
    time.passes(3, STEAM, minute=day)
    assert time.passes(1, STEAM, minute=night) == [STEAMING]
    assert time.passes(1, minute=7 * 60) == [Away("23:00", HOURS)]


def test_taken_back_by_hand_until_the_sign_has_gone_once() -> None:
    time = Time()
    time.passes(3, STEAM)
    time.judge.take_back(["program:steam"])
    assert time.judge.away is None and set(time.passes(QUIET_S * 2, STEAM)) == {None}
    assert time.passes(3, STEAM, HouseSign(kind="program", name="blender", pid=9))[-1] == Away("", "blender runs there"), (
        "another one counts"
    )
    time = Time()
    time.judge.take_back(["program:steam"])
    assert set(time.passes(5, STEAM) + time.passes(1)) == {None} and time.passes(3, STEAM)[-1] == STEAMING


def test_taken_back_by_hand_until_the_hours_have_begun_once() -> None:
    time = Time(HouseJudge(NIGHT, QUIET_S))
    time.passes(1, minute=720)
    time.judge.take_back([HOURS])
    assert set(time.passes(60, minute=720) + time.passes(60, minute=0)) == {None}
    assert time.passes(1, minute=420) == [Away("23:00", HOURS)]


def test_taken_back_while_it_is_quiet() -> None:
    time = Time()
    time.passes(3, STEAM)
    time.passes(60)
    time.judge.take_back([])
    assert time.passes(60) == [None] * 60


def test_a_supervisor_that_is_started_again_knows_it() -> None:
    time = Time(HouseJudge((), QUIET_S, before=STEAMING))
    assert time.judge.away == STEAMING, "before the node has said anything"
    assert set(time.passes(QUIET_S)) == {STEAMING} and time.passes(1) == [None]
    time = Time(HouseJudge((), QUIET_S, before=Away("", ASKED.words)))
    assert time.passes(1) == [None]
    time = Time(HouseJudge(NIGHT, QUIET_S, before=Away("23:00", HOURS)))
    assert time.judge.away == Away("23:00", HOURS) and time.passes(1, minute=0) == [None]
    time = Time(HouseJudge((), QUIET_S, ignored=["program:steam"]))
    assert set(time.passes(60, STEAM)) == {None}
