"""Lines that are taken one by one, in any order, give the figures of all lines at once."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.controller.dashboard import step_curve
from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.snapshot import LossPoint
from homelab.controller.dashboard.step_curve import MOST_COLUMNS, StepCurve
from homelab.shared.protocol.rank_messages import Metric
from tests.controller.dashboard import all_lines

pytestmark = pytest.mark.timeout(60)
TOTAL = 500
SOME = st.floats(0.001, 100.0)


@st.composite
def histories(draw: st.DrawFn) -> list[Metric]:
    """Attempts that go on from anywhere, each line of a rank once; some ranks lack lines, as one whose node is off does."""
    lines: list[Metric] = []
    for attempt in range(1, draw(st.integers(1, 3)) + 1):
        first, count = draw(st.integers(0, 40)), draw(st.integers(0, 45))
        ranks = draw(st.sets(st.integers(0, 3), min_size=1))
        pace_s, lacking = draw(SOME), draw(st.sets(st.tuples(st.integers(0, 3), st.integers(0, 90)), max_size=12))
        for step in range(first, first + count):
            loss = draw(st.sampled_from([None, 2.5, math.nan])) if step % 11 == 3 else 5.0 - step / 50 + attempt / 1000
            lines += [
                Metric(
                    kind="train", attempt=attempt, rank=rank, step=step, loss=loss, tokens=(step * 7 + rank) % 5 * 100,
                    time=1e9 + attempt * 1000 + step * (pace_s + 1) + rank / 7, memory_bytes=step * 3 % 17 or None,
                    step_s=None if step % 13 == 5 and rank == 1 else pace_s + (step * 31 + rank) % 7 / 10,
                )
                for rank in ranks if (rank, step) not in lacking
            ]  # fmt: skip
            if step % 9 == 0:
                lines.append(Metric(kind="eval", attempt=attempt, step=step, eval_loss=4.0 - step / 100, time=1e9))
            if step % 17 == 0:
                lines.append(Metric(kind="shares", attempt=attempt, step=step, message=f"rows moved after step {step}", time=1e9 + step))
    return lines


def pairs(points: tuple[LossPoint, ...]) -> list[tuple[int, str]]:
    return [(point.step, repr(point.loss)) for point in points]  # NaN is like NaN


@settings(max_examples=150, deadline=None)
@given(histories(), st.randoms(use_true_random=False), st.booleans())
def test_taken_one_by_one_they_are_the_figures_of_all(lines: list[Metric], order: random.Random, is_shuffled: bool) -> None:
    if is_shuffled:
        order.shuffle(lines)
    measured = Measured()
    for number, line in enumerate(lines):
        measured.add(line)
        if number % 37 == 0:
            measured.eta_s(1, TOTAL)  # a look in between changes nothing
    assert pairs(measured.losses.points) == [(step, repr(loss)) for step, loss in all_lines.loss_history(lines)]
    assert pairs(measured.eval_losses.points) == [(step, repr(loss)) for step, loss in all_lines.eval_losses(lines)]
    for tokens in (None, 300.0):
        assert measured.eta_s(20, TOTAL, tokens) == all_lines.eta_s(lines, 20, TOTAL, tokens)
    for attempt in (1, 2, 3):
        pace, ranks = measured.pace(attempt), all_lines.rank_lines(lines, attempt)
        assert pace.step_s == all_lines.step_s(lines, attempt)
        assert {rank: course.lines for rank, course in pace.ranks.items()} == {rank: its[-20:] for rank, its in ranks.items()}
        held = {rank: max((line.memory_bytes for line in its if line.memory_bytes), default=None) for rank, its in ranks.items()}
        assert {rank: course.memory_bytes for rank, course in pace.ranks.items()} == held
    assert measured.moves == [line for line in all_lines.in_order(lines) if line.kind == "shares"]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.floats(-9, 9) | st.just(math.nan), st.integers(1, 3)), max_size=60), st.integers(0, 70)
)
def test_the_points_of_a_curve_do_not_depend_on_the_order_of_its_values(values: list[tuple[int, float, int]], cut: int) -> None:
    entries = [(step, value, attempt, float(number)) for number, (step, value, attempt) in enumerate(values)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_curve, "MOST_COLUMNS", 16)
        one, other = StepCurve(), StepCurve()
        for entry in entries:
            one.put(*entry)
        for entry in reversed(entries):
            other.put(*entry)
        for curve in (one, other):
            curve.cut(cut, 2)
        assert pairs(one.points) == pairs(other.points) and len(one.points) <= 34
    newest = {step: value for step, value, attempt, _ in sorted(entries, key=lambda entry: entry[2:]) if step < cut or attempt >= 2}
    finite = [value for value in newest.values() if math.isfinite(value)]
    drawn = [point.loss for point in one.points]
    assert {point.step for point in one.points} <= newest.keys()
    assert not finite or {min(finite), max(finite)} <= set(drawn), "no spike is lost"
    assert not newest or (one.points[0].step, one.points[-1].step) == (min(newest), max(newest))


def test_a_curve_of_very_many_steps_has_few_points_and_every_spike() -> None:
    curve = StepCurve()
    for step in range(1, 100_001):
        curve.put(step, 9.0 if step == 54_321 else 2.0 + step % 7 / 100, 1, float(step))
    points = curve.points
    assert 500 < len(points) <= 2 * MOST_COLUMNS + 2 and LossPoint(step=54_321, loss=9.0) in points
    assert (points[0].step, points[-1].step) == (1, 100_000)


def test_notes_and_saves_are_those_of_all_lines() -> None:
    notes = [Metric(kind="note", time=2.0 - number, rank=number, message=f"note {number % 2}") for number in range(3)]
    saves: list[Any] = [Metric(kind="save", time=10.0 * step + rank, rank=rank, step=step) for step in range(1, 301) for rank in (0, 1)]
    measured = Measured([*notes, *saves])
    assert measured.notes == ["note 0", "note 1"] and measured.saved(300) == {0: 3000.0, 1: 3001.0} and measured.saved(7) == {}


def test_how_often_the_better_answer_is_found_is_that_of_the_newest_attempt() -> None:
    lines = [
        Metric(kind="train", attempt=attempt, step=step, accuracy=step / 10 + attempt / 100)
        for attempt, step in ((1, 5), (2, 3), (1, 6), (2, 4), (1, 4))
    ]
    lines.append(Metric(kind="eval", attempt=1, step=6, eval_accuracy=0.25))
    for _ in range(5):
        random.shuffle(lines)
        measured = Measured(lines)
        assert (measured.accuracy("train"), measured.accuracy("eval")) == (pytest.approx(0.42), 0.25)
    assert Measured([Metric(kind="train", attempt=1, step=1, loss=1.0)]).accuracy("train") is None
