"""The time to the end, from lines of metrics whose truth is known."""

from __future__ import annotations

import pytest

from homelab.controller.dashboard.measured import Measured
from homelab.shared.protocol.rank_messages import Metric


def run(paces: list[float], *, between: dict[int, float] | None = None, ranks: int = 1, attempt: int = 1) -> list[Metric]:
    """Steps from 1 on that take so many seconds; `between` are seconds that pass after a step, for saving and the like."""
    now, lines = 1000.0, []
    for step, pace in enumerate(paces, start=1):
        now += pace
        lines += [Metric(kind="train", time=now, attempt=attempt, rank=rank, step=step, step_s=pace) for rank in range(ranks)]
        now += (between or {}).get(step, 0.0)
    return lines


def eta_s(lines: list[Metric], step: int, total: int | None, step_tokens: float | None = None) -> float | None:
    return Measured(lines).eta_s(step, total, step_tokens)


def test_the_remaining_steps_at_the_pace_so_far() -> None:
    assert eta_s(run([2.0] * 10), 10, 50) == pytest.approx(80.0)
    assert eta_s(run([2.0] * 10, ranks=3), 10, 50) == pytest.approx(80.0)


def test_the_warm_up_says_nothing_of_the_steps_to_come() -> None:
    assert eta_s(run([60.0, 20.0, *[2.0] * 8]), 10, 50) == pytest.approx(80.0)


def test_only_the_first_step_is_known() -> None:
    assert eta_s(run([3.0]), 1, 11) == pytest.approx(30.0)
    assert eta_s([], 0, 11) is None
    assert eta_s(run([3.0]), 1, None) is None


def test_saving_and_evaluating_come_between_steps() -> None:
    lines = run([2.0] * 21, between={10: 5.0, 20: 5.0})
    assert eta_s(lines, 21, 101) == pytest.approx(80 * (2.0 + 10.0 / 20))


def test_after_rows_moved_only_the_new_pace_counts() -> None:
    lines = run([9.0] * 12 + [3.0] * 6)
    moved = Metric(kind="shares", attempt=1, step=12, message="after step 12: rank 1 (laptop) is 3.00 times as slow as expected")
    assert eta_s([*lines, moved], 18, 100) == pytest.approx(82 * 3.0)
    of_before = moved.replace(attempt=0)
    left_s = eta_s([*lines, of_before], 18, 100)
    assert left_s is not None and left_s > 82 * 4


def test_the_newest_attempt_alone_sets_the_pace() -> None:
    lines = run([9.0] * 20) + [line.replace(step=line.step + 20) for line in run([2.0] * 10, attempt=2)]
    assert eta_s(lines, 30, 100) == pytest.approx(140.0)


def test_the_pace_is_per_token_where_a_typical_step_is_known() -> None:
    """Steps of 100 and of 300 tokens in turn, at 0.01 s a token, seen when more of the long ones have come."""
    sizes = [100, 100, 300, 300, 300, 100, 300]
    lines = [line.replace(tokens=size) for line, size in zip(run([size / 100 for size in sizes]), sizes, strict=True)]
    assert eta_s(lines, 7, 107, 200.0) == pytest.approx(200.0)
    left_s = eta_s(lines, 7, 107)
    assert left_s is not None and left_s > 250


def test_two_ranks_share_the_tokens_of_a_step() -> None:
    lines = [line.replace(tokens=50) for line in run([1.0] * 8, ranks=2)]
    assert eta_s(lines, 8, 18, 200.0) == pytest.approx(20.0)
    assert eta_s(lines[:-1], 8, 18, 200.0) == pytest.approx(20.0), "the last line of the other rank has not come yet"
