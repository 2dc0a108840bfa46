"""Hours, expected times, sweeps, and what the lines of a unit say: pure."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.features.queue import hours, service, sweep, turns
from homelab.controller.features.queue.turns import Clock, Listing, SeenRun
from tests.controller.features.queue.practice_nodes import NIGHT, job

pytestmark = pytest.mark.timeout(100)
HOUR = 3600.0
BOTH = ("a", "b")


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def at(clock: str) -> float:
    """This time of a day in summer, on that clock."""
    return time.mktime(time.strptime(f"2026-06-10 {clock}", "%Y-%m-%d %H:%M"))


@pytest.mark.parametrize(
    ("clock", "open_"),
    [("22:59", False), ("23:00", True), ("23:59", True), ("00:00", True), ("06:59", True), ("07:00", False), ("12:00", False)],
)
def test_a_night_is_open_from_one_time_to_the_other(clock: str, open_: bool) -> None:
    night = job(not_before="23:00", stop_at="07:00")
    assert hours.is_open(night, at(clock)) is open_
    assert hours.opens(night, at(clock)) == (at(clock) if open_ else at("23:00"))


def test_an_hour_that_summer_time_leaves_out_still_comes() -> None:
    day = time.mktime((2026, 3, 29, 0, 30, 0, 0, 0, -1))  # 02:30 is not there
    assert hours.following("02:30", day) == time.mktime((2026, 3, 29, 3, 30, 0, 0, 0, -1))
    assert hours.following("00:00", day) - day == 23.5 * HOUR - HOUR


def test_a_time_to_stop_alone_begins_where_it_was_added() -> None:
    assert hours.window("", "7:00", at("22:14")) == ("22:14", "07:00")
    assert hours.window("23:00", "", at("22:14")) == ("23:00", "")
    with pytest.raises(InputError, match="no time to train"):
        hours.window("", "22:14", at("22:14"))


def test_expected_times_follow_the_order_the_nodes_and_the_nights() -> None:
    evening = at("22:00")
    jobs = [
        job(1, seconds=2 * HOUR), job(2, seconds=9 * HOUR, not_before="23:00", stop_at="07:00", nodes=("a",)), job(3, seconds=HOUR, nodes=("b",)), job(4),
        job(5, seconds=1.0),
    ]  # fmt: skip
    jobs = [one.model_copy(update={"added_at": evening}) for one in jobs]
    times = turns.expected(Listing(tuple(jobs)), Clock(evening, BOTH))
    assert (times[1].begins, times[1].ends) == (evening, evening + 2 * HOUR)
    assert (times[3].begins, times[3].ends) == (evening + 2 * HOUR, evening + 3 * HOUR)
    assert times[4].begins == evening + 3 * HOUR and times[4].ends is None and times[5].begins is None
    alone = turns.expected(Listing((jobs[1],)), Clock(evening, BOTH))[2]
    assert (alone.begins, alone.ends) == (at("23:00"), at("23:00") + 25 * HOUR), "8 hours, and one in the next night"
    trains = jobs[0].launched("run", evening - HOUR)
    after = jobs[2].model_copy(update={"after": "1", "nodes": ()})
    times = turns.expected(Listing((after,), (trains,)), Clock(evening, BOTH))
    assert times[1].ends == evening + HOUR == times[3].begins


def test_a_job_waits_for_another_however_that_ends_and_for_a_run() -> None:
    first, second = job(1), job(2, after="1")
    assert turns.waits(Listing((first, second)), Clock(NIGHT, BOTH))[2] == "after job 1"
    assert turns.waits(Listing((second,), failed=(first.ended("failed", "x", NIGHT),)), Clock(NIGHT, BOTH)) == {2: ""}
    assert turns.waits(Listing((second,)), Clock(NIGHT, BOTH)) == {2: ""}, "it was removed"
    of_run = job(3, after="2026-11-21-1405-demo")
    assert turns.waits(Listing((of_run,)), Clock(NIGHT, BOTH, lambda run: False)) == {3: "after 2026-11-21-1405-demo"}


def test_what_is_next_for_a_run() -> None:
    trains = job(1).launched("run", NIGHT)
    act = turns.next_act(trains, SeenRun("failed", True, has_said_its_end=True, because="the disk is full", machine="a"), NIGHT)
    assert (act.kind, act.because, act.machine) == ("failed", "the disk is full", "a")
    assert turns.next_act(trains, SeenRun("failed", True), NIGHT).kind == "supervise", "its supervisor died: it has tried nothing yet"
    assert turns.next_act(trains, SeenRun("failed", True), NIGHT, is_supervised=False).kind == "failed"
    assert turns.next_act(trains, SeenRun("running", False, is_owned=True), NIGHT).kind == "follow"
    assert turns.next_act(trains, SeenRun("running", False), NIGHT).kind == "supervise"
    assert turns.next_act(trains, SeenRun("lost", False, is_owned=True), NIGHT).kind == "follow"
    assert turns.next_act(trains, None, NIGHT).kind == "back"


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("train.steps=1,2", [1, 2]), ("train.learning_rate=1e-4, 2e-4", [1e-4, 2e-4]), ("train.precision=bf16,fp32", ["bf16", "fp32"]),
        ('method.targets=["q_proj","k_proj"],"all-linear"', [["q_proj", "k_proj"], "all-linear"]), ("checkpoint.every_steps=5", [5]),
        ("data.packing=true,false", [True, False]),
    ],
)  # fmt: skip
def test_values_are_read_as_the_recipe_has_them(typed: str, values: list[object]) -> None:
    assert [one[0].value for one in sweep.combinations([typed])] == values


def test_a_sweep_is_every_combination_and_keeps_the_text() -> None:
    found = sweep.combinations(["train.learning_rate=1e-4,2e-4", "method.rank=8,16"])
    assert [" ".join(map(str, one)) for one in found][:2] == [
        "train.learning_rate=1e-4 method.rank=8",
        "train.learning_rate=1e-4 method.rank=16",
    ]
    assert len(found) == 4 and sweep.combinations([]) == [()]
    text = "# mine\n[train]\nlearning_rate = 1e-3 # old\n"
    assert (
        sweep.applied(text, found[3]) == "# mine\n[train]\nlearning_rate = 0.0002 # old\n\n[method]\nrank = 16\n"
        and sweep.applied(text, ()) == text
    )
    with pytest.raises(InputError, match="100 at most"):
        sweep.combinations([f"train.steps={','.join(map(str, range(1, 102)))}"])


def test_the_words_of_a_unit_are_quoted() -> None:
    text = service.unit(["/usr/bin/python3", "--runs-dir", '/home/me/my "runs"/100%/$HOME'])
    assert 'ExecStart=/usr/bin/python3 --runs-dir "/home/me/my \\"runs\\"/100%%/$$HOME"\n' in text and "KillMode=process" in text
