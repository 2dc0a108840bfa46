"""When an automatic checkpoint is due: the two promises, and that all ranks come to the same answer."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.shared.law import checkpoint_interval
from homelab.shared.law.checkpoint_interval import COST, LEAST_S, LOSS_S, Interval

pytestmark = pytest.mark.timeout(60)


@settings(deadline=None)
@given(stall_s=st.floats(0, 100), write_s=st.floats(0, 300))
def test_saving_costs_no_more_than_promised_and_a_fault_loses_no_more_where_both_can_be_kept(stall_s: float, write_s: float) -> None:
    found = checkpoint_interval.seconds(stall_s, write_s)
    assert stall_s <= COST * (found + stall_s), "the cost is kept always"
    assert found >= write_s, "the next save does not wait for the last one"
    if checkpoint_interval.loses_more(stall_s, write_s):
        assert found + write_s > LOSS_S and (stall_s > COST * LOSS_S or write_s > 0)
    else:
        assert found + write_s <= LOSS_S + 1e-9


def test_figures() -> None:
    assert checkpoint_interval.seconds(0.0) == checkpoint_interval.seconds(0.01) == LEAST_S
    assert checkpoint_interval.seconds(0.5) == pytest.approx(60.0)  # sqrt(2 x 0.5 x 3600)
    assert checkpoint_interval.seconds(4.0) == LOSS_S and checkpoint_interval.seconds(4.0, write_s=30) == pytest.approx(4.0 / COST)
    assert checkpoint_interval.seconds(8.4) == pytest.approx(240.0) and checkpoint_interval.loses_more(8.4, 0.0)
    assert checkpoint_interval.seconds(0.5, write_s=100.0) == 100.0 and checkpoint_interval.loses_more(0.5, 100.0)


def play(steps_s: list[float], stall_s: float, write_s: float = 0.0, *, known_s: float | None = None, start: int = 0) -> list[int]:
    """The steps after which three ranks with clocks of their own save; all must say the same at every step."""
    draw = random.Random(1)
    clocks = [draw.uniform(0, 1e6) for _ in range(3)]  # monotonic clocks begin anywhere
    ranks = [Interval(None, known_s if number == 1 else None) for number in range(3)]
    for rank, clock in zip(ranks, clocks, strict=True):
        rank.begin(clock)
    saved, last_s = [], 0.0
    for step, step_s in enumerate(steps_s, start + 1):
        clocks = [clock + step_s for clock in clocks]
        told = [rank.numbers(clock - draw.uniform(0, 0.01), last_s) for rank, clock in zip(ranks, clocks, strict=True)]
        last_s = step_s
        for rank in ranks:
            rank.update(told)
        due = {rank.is_due(step, last=step == start + len(steps_s)) for rank in ranks}
        assert len(due) == 1, "every rank decides from the same numbers"
        if due.pop():
            saved.append(step)
            clocks = [clock + stall_s for clock in clocks]
            for number, (rank, clock) in enumerate(zip(ranks, clocks, strict=True)):
                rank.saved(clock, stall_s * draw.uniform(0.9, 1), write_s if number == 0 else 0.0)
    return saved


@settings(deadline=None, max_examples=40)
@given(step_s=st.floats(0.2, 20), stall_s=st.floats(0.01, 4.0))
def test_both_promises_hold_over_a_run(step_s: float, stall_s: float) -> None:
    count = max(3, int(1000 / step_s))
    saved = play([step_s] * count, stall_s)
    assert saved[0] == checkpoint_interval.FIRST_STEP and saved[-1] == count
    between = [later - earlier for earlier, later in itertools.pairwise(saved[:-1])]
    if not between:
        return
    assert max(between) * step_s <= max(LOSS_S, stall_s / COST + step_s) + 1, "a fault loses two minutes at most"
    # The first is there before anybody knows what one costs, and the last one is always there.
    assert min(between) * step_s >= min(LEAST_S - step_s, stall_s / COST - 1)
    assert stall_s / (min(between) * step_s + stall_s) <= COST * 1.13, "within what the ranks' clocks differ"


def test_a_slow_step_is_not_begun_when_it_would_be_too_late_to_save_after_it() -> None:
    assert play([50.0] * 6, 2.0) == [1, 3, 5, 6], "after 100 s, not after 150"
    assert play([300.0] * 3, 2.0) == [1, 2, 3], "steps that are longer than the promise are saved one by one"


def test_an_attempt_that_goes_on_knows_what_its_saves_cost_or_measures_anew() -> None:
    assert play([1.0] * 200, 0.5, known_s=0.5, start=40)[0] == 40 + 60, "told by one rank, believed by all"
    assert play([1.0] * 200, 0.5, start=40)[0] == 40 + 60 == 40 + checkpoint_interval.UNMEASURED_S
    assert play([1.0] * 200, 2.5, known_s=0.1, start=40)[:2] == [40 + 26, 40 + 26 + 120], "what is measured counts"


def test_steps_that_the_recipe_names_stay_exactly_those() -> None:
    named = Interval(3)
    assert [step for step in range(1, 9) if named.is_due(step, last=step == 8)] == [3, 6, 8]


@pytest.mark.parametrize("every", [None, 2, 3, 4, 6])
def test_a_step_that_is_kept_is_saved_beside_the_others_and_a_plan_counts_it(every: int | None) -> None:
    kept = Interval(every, keep_every=4)
    saved = [step for step in range(1, 14) if kept.is_due(step, last=step == 13)]
    assert {4, 8, 12, 13} <= set(saved) and (every != 4 or saved == [4, 8, 12, 13])
    if every is not None:
        for begin in (0, 1, 4, 5):
            assert checkpoint_interval.saves(every, 13, begin, 1.0, 0.1, keep_every=4) == sum(step > begin for step in saved)


@pytest.mark.parametrize("every", [None, 100])
def test_one_node_that_is_asked_has_all_ranks_save_once(every: int | None) -> None:
    ranks = [Interval(every) for _ in range(3)]
    saved = []
    for step in range(2, 8):
        told = [rank.numbers(float(step), 1.0, is_asked=number == 1 and step == 4) for number, rank in enumerate(ranks)]
        for rank in ranks:
            rank.update(told)
        due = {rank.is_due(step, last=False) for rank in ranks}
        assert len(due) == 1, "every rank decides from the same numbers"
        saved += [step] if due.pop() else []
    assert saved == [4]


def test_one_slow_save_is_no_rule() -> None:
    mine = Interval(None)
    for stall_s in (0.2, 9.0, 0.3):
        mine.saved(100.0, stall_s, 0.0)
    assert mine.own_stall_s == 0.3


@pytest.mark.parametrize(
    ("every", "steps", "resume", "expected"),
    [(30, 100, 0, 4), (30, 100, 60, 2), (None, 121, 0, 3), (None, 121, 61, 1), (None, 1, 0, 1), (None, 0, 0, 0), (None, 50, 50, 0)],
)
def test_how_many_saves_the_plan_predicts(every: int | None, steps: int, resume: int, expected: int) -> None:
    assert checkpoint_interval.saves(every, steps, resume, step_s=1.0, stall_s=0.5) == expected
    if every is None and steps > resume:
        assert len(play([1.0] * (steps - resume), 0.5, known_s=0.5, start=resume)) in (expected, expected + 1)
