"""Runs of a few steps count together, the newest first; a long run counts alone; a strategy has its own price."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from homelab.controller.planning.speed import measured_speed


@dataclass(frozen=True)
class Run:
    steps: int
    token_s: float
    strategy: str = "ddp"
    world_size: int = 2
    step_s: float = 0.0
    micro_batch_s: float = 0.0


@pytest.mark.parametrize(
    ("runs", "token_s"),
    [
        ([Run(3, 1.0)], 1.0),
        ([Run(3, 1.0), Run(3, 2.0)], 1.5),
        ([Run(10, 1.0), Run(20, 4.0)], 2.5),  # of the older run only what is missing to 20 steps
        ([Run(20, 1.0), Run(20, 4.0)], 1.0),
    ],
)
def test_the_newest_steps_count(runs: list[Run], token_s: float) -> None:
    assert measured_speed.mean(runs).token_s == pytest.approx(token_s)


def test_a_strategy_that_costs_time_itself() -> None:
    slow, fast, alone = Run(20, 3.0, "zero3"), Run(20, 1.0), Run(20, 1.0, world_size=1)
    ranks = [[fast, slow, alone], [fast, slow, alone]]
    assert measured_speed.slowdown(ranks, "ddp", 2, 100.0) == pytest.approx(1.0)
    assert measured_speed.slowdown(ranks, "zero3", 2, 100.0) == pytest.approx((6 + 40 * 3) / 46)
    assert measured_speed.slowdown(ranks, "zero3", 1, 100.0) == pytest.approx(1.0), (
        "a rank alone shares nothing, whatever its strategy is called"
    )
    assert measured_speed.slowdown(ranks, "zero2", 2, 100.0) == 1.0, "nobody has tried it"
    assert measured_speed.slowdown([], "ddp", 2, 100.0) == 1.0


def test_a_short_run_says_little_of_a_strategy() -> None:
    assert measured_speed.slowdown([[Run(20, 1.0), Run(1, 2.0, "zero3")]], "zero3", 2, 100.0) == pytest.approx((6 + 2) / 7)
