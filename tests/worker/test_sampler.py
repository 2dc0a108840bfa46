"""Which rows are trained when and where: properties that hold for every size and every share."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.worker import sampler
from homelab.worker.speed import Speed

pytestmark = pytest.mark.timeout(60)

shares_of_ranks = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
lengths_of_rows = st.lists(st.integers(1, 2000), max_size=60)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), batch=st.integers(1, 50), epochs=st.integers(1, 3))
def test_every_row_is_trained_exactly_once_per_epoch(seed: int, count: int, batch: int, epochs: int) -> None:
    per_epoch = sampler.steps_per_epoch(count, batch)
    for epoch in range(epochs):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            found, rows = sampler.step_rows(step, seed=seed, count=count, global_batch=batch)
            assert found == epoch
            assert 1 <= len(rows) <= batch
            seen += rows
        assert sorted(seen) == list(range(count))


def test_the_order_is_what_it_always_was() -> None:
    """A run that resumes under a newer version must go on in the same order."""
    assert sampler.permutation(42, 0, 10) == (7, 3, 8, 2, 9, 6, 1, 0, 5, 4)
    assert sampler.permutation(42, 1, 10) != sampler.permutation(42, 0, 10)
    assert sampler.permutation(43, 0, 10) != sampler.permutation(42, 0, 10)


@given(count=st.integers(2, 40))
def test_orders_are_spread_evenly(count: int) -> None:
    """No place in the order is favoured: over many seeds the first row is each row about equally often."""
    first = [sampler.permutation(seed, 0, count)[0] for seed in range(200)]
    assert max(first.count(row) for row in set(first)) <= 200 / count + 6 * (200 / count) ** 0.5 + 1


def assign(lengths: list[int], rates: list[int], quotas: list[int] | None = None) -> list[list[int]]:
    """Ranks of such relative speeds, with room for anything."""
    speeds = [Speed(0.0, 0.0, 1 / rate if rate else 1.0) for rate in rates]
    return sampler.assign(lengths, speeds, [sampler.Limits(10**9)] * len(rates), quotas)


@given(rows=st.integers(0, 100), shares=shares_of_ranks)
def test_quotas_use_every_row_and_respect_shares(rows: int, shares: list[int]) -> None:
    found = sampler.quotas(rows, shares)
    assert sum(found) == rows
    assert all(quota == 0 for quota, share in zip(found, shares, strict=True) if share == 0)
    for quota, share in zip(found, shares, strict=True):
        assert abs(quota - rows * share / sum(shares)) < 1
        if rows <= sum(shares):
            assert quota <= share


def test_a_full_batch_is_the_shares_themselves() -> None:
    assert sampler.quotas(12, [6, 4, 2]) == [6, 4, 2]
    assert sampler.quotas(8, [6, 4, 2]) == [4, 3, 1]
    assert sampler.quotas(1, [6, 4, 2]) == [1, 0, 0]


@given(lengths=lengths_of_rows, shares=shares_of_ranks)
def test_each_row_of_a_batch_goes_to_one_rank_and_quotas_hold(lengths: list[int], shares: list[int]) -> None:
    quotas = sampler.quotas(len(lengths), shares)
    parts = assign(lengths, shares, quotas)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    assert [len(part) for part in parts] == quotas


@settings(max_examples=50)
@given(draw=st.randoms(use_true_random=False), shares=st.lists(st.integers(4, 12), min_size=2, max_size=4))
def test_longest_first_balances_better_than_taking_turns(draw, shares: list[int]) -> None:
    """Finish times, (tokens / speed), of the slowest rank: never more than a little above taking rows as they come."""
    lengths = [draw.choice([30, 60, 120, 500, 900]) for _ in range(sum(shares))]

    def slowest(parts: list[list[int]]) -> float:
        return max(sum(lengths[row] for row in part) / share for part, share in zip(parts, shares, strict=True))

    order = iter(range(len(lengths)))
    as_they_come = [[next(order) for _ in range(share)] for share in shares]
    assert slowest(assign(lengths, shares)) <= slowest(as_they_come) * 1.02


def test_the_fast_rank_gets_the_long_rows() -> None:
    assert assign([10, 100, 10, 10], [3, 1], [3, 1]) == [[1, 2, 3], [0]]


def test_a_slow_rank_gets_one_row_so_that_it_can_be_measured() -> None:
    assert assign([90, 50, 20], [1000, 1]) == [[0, 1], [2]]
    assert assign([90], [1000, 1]) == [[0], []]


def test_a_rank_never_gets_a_row_that_it_has_no_room_for() -> None:
    limits = [sampler.Limits(40, None, 40), sampler.Limits(200, None, None)]
    speeds = [Speed(0, 0, 0.001), Speed(0, 0, 1)]
    assert sampler.assign([100, 41, 40, 7], speeds, limits) == [[2, 3], [0, 1]]


def test_what_no_rank_takes_goes_to_the_roomiest() -> None:
    limits = [sampler.Limits(40, None, 40), sampler.Limits(30, None, 30)]
    assert sampler.assign([100, 10], [Speed(0, 0, 1)] * 2, limits) == [[0], [1]]


def test_padding_counts_in_what_a_row_costs() -> None:
    """Passes that cost a lot make short rows share a pass with long ones; passes that cost nothing keep every row alone."""
    lengths = [100, 60, 50, 10]
    assert sampler.micro_batches(range(4), lengths, Speed(0, 1000, 1), sampler.Limits(400)) == [[0, 1, 2, 3]]
    assert sampler.micro_batches(range(4), lengths, Speed(0, 0, 1), sampler.Limits(400)) == [[0], [1], [2], [3]]
    assert sampler.micro_batches(range(4), lengths, Speed(0, 20, 1), sampler.Limits(400)) == [[0], [1, 2], [3]]
    assert sampler.micro_batches(range(4), lengths, Speed(0, 1000, 1), sampler.Limits(400, 2)) == [[0, 1], [2, 3]]


def test_without_padding_only_the_sum_counts() -> None:
    lengths = [100, 60, 50, 10]
    joined = sampler.Limits(170, padded=False)
    assert sampler.micro_batches(range(4), lengths, Speed(0, 1, 1), joined) == [[0], [1, 2, 3]]
    assert sampler.micro_batches(range(4), lengths, Speed(0, 1, 1), sampler.Limits(220, padded=False)) == [[0, 1, 2, 3]]
    # One rank may hold all of it, the other is as fast with a row at a time: tokens decide, not rows times the longest.
    both = sampler.assign([100, 50, 25, 25], [Speed(0, 0, 1), Speed(0, 0, 1)], [joined, sampler.Limits(100, padded=False)])
    assert both == [[0], [1, 2, 3]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9), most=st.integers(1, 4), room=st.integers(60, 200),
    pass_tokens=st.integers(0, 200), padded=st.booleans(),
)  # fmt: skip
def test_micro_batches_hold_every_row_once_at_the_least_cost(
    lengths: list[int], most: int, room: int, pass_tokens: int, padded: bool
) -> None:
    rows = list(range(100, 100 + len(lengths)))
    speed, limits = Speed(0.0, pass_tokens, 1.0), sampler.Limits(room, most, padded=padded)

    def tokens(own: list[int]) -> int:
        return len(own) * max(own) if padded else sum(own)

    cuts = sampler.micro_batches(rows, lengths, speed, limits)
    assert sorted(row for cut in cuts for row in cut) == rows
    assert all(1 <= len(cut) <= most for cut in cuts)
    assert all(len(cut) == 1 or tokens([lengths[row - 100] for row in cut]) <= room for cut in cuts)
    ordered = sorted(lengths, reverse=True)

    def least(start: int) -> float:
        """By trying every first pass: what dynamic programming must come to."""
        if start == len(ordered):
            return 0.0
        sizes = range(1, len(ordered) - start + 1)
        costs = {size: tokens(ordered[start : start + size]) for size in sizes}
        return min(pass_tokens + costs[size] + least(start + size) for size in sizes if limits.holds(size, costs[size]))

    assert speed.seconds([tokens([lengths[row - 100] for row in cut]) for cut in cuts]) == least(0)
    flat = [lengths[row - 100] for cut in cuts for row in cut]
    assert flat == sorted(flat, reverse=True)


@given(lengths=st.lists(st.integers(1, 64), max_size=80))
def test_packing_loses_and_doubles_nothing(lengths: list[int]) -> None:
    bins = sampler.pack(lengths, 64)
    assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in members) <= 64 for members in bins)
    # Best fit decreasing: no two bins could be one.
    filled = sorted(sum(lengths[row] for row in members) for members in bins)
    assert len(filled) < 2 or filled[0] + filled[1] > 64


def test_rows_of_like_length_go_together_so_that_little_is_padded() -> None:
    """Costs as measured on three practice nodes; the step against the sum of what each does alone. Longest first alone comes to 0.87."""
    speeds = [Speed(0.02, 0.031, 0.00065), Speed(0.02, 0.08, 0.00138), Speed(0.03, 0.12, 0.00205)]
    limits, draw = [sampler.Limits(2048)] * 3, random.Random(1)
    reached = []
    for _ in range(8):
        lengths = [min(512, max(4, round(draw.lognormvariate(3.9, 0.8)))) for _ in range(84)]

        def seconds(rank: int, rows: list[int], lengths: list[int] = lengths) -> float:
            mine = [lengths[row] for row in rows]
            cuts = sampler.micro_batches(range(len(mine)), mine, speeds[rank], limits[rank])
            return speeds[rank].seconds([len(cut) * max(mine[row] for row in cut) for cut in cuts])

        alone = sum(1 / seconds(rank, list(range(84))) for rank in range(3))
        parts = sampler.assign(lengths, speeds, limits)
        reached.append(1 / max(seconds(rank, rows) for rank, rows in enumerate(parts)) / alone)
    assert sum(reached) / len(reached) > 0.95
