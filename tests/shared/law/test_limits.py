"""The limits of a planned rank: what the planner predicts with and the worker computes with."""

from __future__ import annotations

import pytest

from homelab.shared.law.limits import Limits


@pytest.mark.parametrize(
    ("micro_batch", "token_cap", "asked", "limits"),
    [
        (4, None, "auto", Limits(2048)),
        (4, None, 4, Limits(2048, pass_rows=4)),
        (1, 300, "auto", Limits(300, row_tokens=300)),
        (2, 300, 2, Limits(300, pass_rows=2, row_tokens=300)),
        (0, None, "auto", Limits(512)),
    ],
    ids=["memory counts tokens", "a number counts rows", "a cap on tokens", "both", "nothing fits: one row at a time"],
)
def test_limits_of_a_planned_rank(micro_batch: int, token_cap: int | None, asked: int | str, limits: Limits) -> None:
    assert Limits.planned(micro_batch, token_cap, seq_len=512, asked=asked) == limits  # type: ignore[arg-type]


def test_a_single_row_always_passes_and_a_row_that_is_too_long_is_refused() -> None:
    limits = Limits(100, row_tokens=100)
    assert limits.holds(1, 150)
    assert not limits.takes(101)
    assert not limits.holds(2, 101)
