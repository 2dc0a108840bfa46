"""Which rank computes which rows: every row has one rank, and the ranks finish together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.shared.law.assignment import assign
from homelab.shared.law.limits import Limits
from homelab.shared.law.order import quotas
from homelab.shared.law.packing import micro_batches
from homelab.shared.law.speed import Speed

pytestmark = pytest.mark.timeout(60)

shares_of_ranks = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
lengths_of_rows = st.lists(st.integers(1, 2000), max_size=60)


def by_rates(lengths: list[int], rates: list[int], rows_of: list[int] | None = None) -> list[list[int]]:
    """Ranks of such relative speeds, with room for anything."""
    speeds = [Speed(0.0, 0.0, 1 / rate if rate else 1.0) for rate in rates]
    return assign(lengths, speeds, [Limits(10**9)] * len(rates), rows_of)


@given(lengths=lengths_of_rows, shares=shares_of_ranks)
def test_each_row_of_a_batch_goes_to_one_rank_and_quotas_hold(lengths: list[int], shares: list[int]) -> None:
    rows_of = quotas(len(lengths), shares)
    parts = by_rates(lengths, shares, rows_of)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert [len(part) for part in parts] == rows_of


@settings(max_examples=50)
@given(draw=st.randoms(use_true_random=False), shares=st.lists(st.integers(4, 12), min_size=2, max_size=4))
def test_longest_first_balances_better_than_taking_turns(draw, shares: list[int]) -> None:
    """Finish times, (tokens / speed), of the slowest rank: never more than a little above taking rows as they come."""
    lengths = [draw.choice([30, 60, 120, 500, 900]) for _ in range(sum(shares))]

    def slowest(parts: list[list[int]]) -> float:
        return max(sum(lengths[row] for row in part) / share for part, share in zip(parts, shares, strict=True))

    order = iter(range(len(lengths)))
    as_they_come = [[next(order) for _ in range(share)] for share in shares]
    assert slowest(by_rates(lengths, shares)) <= slowest(as_they_come) * 1.02


def test_the_fast_rank_gets_the_long_rows() -> None:
    assert by_rates([10, 100, 10, 10], [3, 1], [3, 1]) == [[1, 2, 3], [0]]


def test_a_slow_rank_gets_one_row_so_that_it_can_be_measured() -> None:
    assert by_rates([90, 50, 20], [1000, 1]) == [[0, 1], [2]]
    assert by_rates([90], [1000, 1]) == [[0], []]


def test_a_rank_never_gets_a_row_that_it_has_no_room_for() -> None:
    limits = [Limits(40, None, 40), Limits(200, None, None)]
    speeds = [Speed(0, 0, 0.001), Speed(0, 0, 1)]
    assert assign([100, 41, 40, 7], speeds, limits) == [[2, 3], [0, 1]]


def test_what_no_rank_takes_goes_to_the_roomiest() -> None:
    limits = [Limits(40, None, 40), Limits(30, None, 30)]
    assert assign([100, 10], [Speed(0, 0, 1)] * 2, limits) == [[0], [1]]


def test_without_padding_only_the_sum_counts() -> None:
    lengths = [100, 60, 50, 10]
    joined = Limits(170, padded=False)
    assert micro_batches(range(4), lengths, Speed(0, 1, 1), joined) == [[0], [1, 2, 3]]
    assert micro_batches(range(4), lengths, Speed(0, 1, 1), Limits(220, padded=False)) == [[0, 1, 2, 3]]
    # One rank may hold all of it, the other is as fast with a row at a time: tokens decide, not rows times the longest.
    both = assign([100, 50, 25, 25], [Speed(0, 0, 1), Speed(0, 0, 1)], [joined, Limits(100, padded=False)])
    assert both == [[0], [1, 2, 3]]


def test_rows_of_like_length_go_together_so_that_little_is_padded() -> None:
    """Costs as measured on three practice nodes; the step against the sum of what each does alone. Longest first alone comes to 0.87."""
    speeds = [Speed(0.02, 0.031, 0.00065), Speed(0.02, 0.08, 0.00138), Speed(0.03, 0.12, 0.00205)]
    limits, draw = [Limits(2048)] * 3, random.Random(1)
    reached = []
    for _ in range(8):
        lengths = [min(512, max(4, round(draw.lognormvariate(3.9, 0.8)))) for _ in range(84)]

        def seconds(rank: int, rows: list[int], lengths: list[int] = lengths) -> float:
            mine = [lengths[row] for row in rows]
            cuts = micro_batches(range(len(mine)), mine, speeds[rank], limits[rank])
            return speeds[rank].seconds([len(cut) * max(mine[row] for row in cut) for cut in cuts])

        alone = sum(1 / seconds(rank, list(range(84))) for rank in range(3))
        parts = assign(lengths, speeds, limits)
        reached.append(1 / max(seconds(rank, rows) for rank, rows in enumerate(parts)) / alone)
    assert sum(reached) / len(reached) > 0.95
