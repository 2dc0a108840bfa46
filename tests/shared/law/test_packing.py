"""Rows in forward passes and in bins: each once, at the least cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.shared.law.limits import Limits
from homelab.shared.law.packing import micro_batches, pack
from homelab.shared.law.speed import Speed

pytestmark = pytest.mark.timeout(60)


def test_padding_counts_in_what_a_row_costs() -> None:
    """Passes that cost a lot make short rows share a pass with long ones; passes that cost nothing keep every row alone."""
    lengths = [100, 60, 50, 10]
    assert micro_batches(range(4), lengths, Speed(0, 1000, 1), Limits(400)) == [[0, 1, 2, 3]]
    assert micro_batches(range(4), lengths, Speed(0, 0, 1), Limits(400)) == [[0], [1], [2], [3]]
    assert micro_batches(range(4), lengths, Speed(0, 20, 1), Limits(400)) == [[0], [1, 2], [3]]
    assert micro_batches(range(4), lengths, Speed(0, 1000, 1), Limits(400, 2)) == [[0, 1], [2, 3]]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9), most=st.integers(1, 4), room=st.integers(60, 200),
    pass_tokens=st.integers(0, 200), padded=st.booleans(), floor=st.integers(0, 150),
)  # fmt: skip
def test_micro_batches_hold_every_row_once_at_the_least_cost(
    lengths: list[int], most: int, room: int, pass_tokens: int, padded: bool, floor: int
) -> None:
    rows = list(range(100, 100 + len(lengths)))
    speed, limits = Speed(0.0, pass_tokens, 1.0, floor), Limits(room, most, padded=padded)

    def tokens(own: list[int]) -> int:
        return len(own) * max(own) if padded else sum(own)

    cuts = micro_batches(rows, lengths, speed, limits)
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
        return min(max(floor, pass_tokens + costs[size]) + least(start + size) for size in sizes if limits.holds(size, costs[size]))

    assert speed.seconds([tokens([lengths[row - 100] for row in cut]) for cut in cuts]) == least(0)
    flat = [lengths[row - 100] for cut in cuts for row in cut]
    assert flat == sorted(flat, reverse=True)


@given(lengths=st.lists(st.integers(1, 64), max_size=80))
def test_packing_loses_and_doubles_nothing(lengths: list[int]) -> None:
    bins = pack(lengths, 64)
    assert sorted(row for members in bins for row in members) == list(range(len(lengths)))
    assert all(sum(lengths[row] for row in members) <= 64 for members in bins)
    # Best fit decreasing: no two bins could be one.
    filled = sorted(sum(lengths[row] for row in members) for members in bins)
    assert len(filled) < 2 or filled[0] + filled[1] > 64
