"""The order of the rows and the quotas of the ranks: properties for every size and every share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.shared.law.order import permutation, quotas, step_rows, steps_per_epoch

pytestmark = pytest.mark.timeout(60)

shares_of_ranks = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 300), batch=st.integers(1, 50), epochs=st.integers(1, 3))
def test_every_row_is_trained_exactly_once_per_epoch(seed: int, count: int, batch: int, epochs: int) -> None:
    per_epoch = steps_per_epoch(count, batch)
    for epoch in range(epochs):
        seen: list[int] = []
        for step in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            found, rows = step_rows(step, seed=seed, count=count, global_batch=batch)
            assert found == epoch
            assert 1 <= len(rows) <= batch
            seen += rows
        assert sorted(seen) == list(range(count))


def test_the_order_is_what_it_always_was() -> None:
    """A run that resumes under a newer version must go on in the same order."""
    assert permutation(42, 0, 10) == (7, 3, 8, 2, 9, 6, 1, 0, 5, 4)
    assert permutation(42, 1, 10) != permutation(42, 0, 10)
    assert permutation(43, 0, 10) != permutation(42, 0, 10)


@given(count=st.integers(2, 40))
def test_orders_are_spread_evenly(count: int) -> None:
    """No place in the order is favoured: over many seeds the first row is each row about equally often."""
    first = [permutation(seed, 0, count)[0] for seed in range(200)]
    assert max(first.count(row) for row in set(first)) <= 200 / count + 6 * (200 / count) ** 0.5 + 1


@given(rows=st.integers(0, 100), shares=shares_of_ranks)
def test_quotas_use_every_row_and_respect_shares(rows: int, shares: list[int]) -> None:
    found = quotas(rows, shares)
    assert sum(found) == rows
    assert all(quota == 0 for quota, share in zip(found, shares, strict=True) if share == 0)
    for quota, share in zip(found, shares, strict=True):
        assert abs(quota - rows * share / sum(shares)) < 1
        if rows <= sum(shares):
            assert quota <= share


def test_a_full_batch_is_the_shares_themselves() -> None:
    assert quotas(12, [6, 4, 2]) == [6, 4, 2]
    assert quotas(8, [6, 4, 2]) == [4, 3, 1]
    assert quotas(1, [6, 4, 2]) == [1, 0, 0]
