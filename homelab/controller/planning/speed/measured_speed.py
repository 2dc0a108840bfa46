"""One speed from several runs, and how much longer a strategy takes for the same rows. Pure.

A run of a few steps measures a rank over seconds; a machine that also does other things differs by more than that from minute to minute. So
runs are taken together until they have as many steps as a long run's own window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from homelab.shared.law.speed import Speed

ENOUGH_STEPS = 20  # the window over which a run measures: a run that long speaks alone
_PRIOR_STEPS = 6  # a strategy counts as no slower than others with the weight of so many steps


class MeasuredRun(Protocol):
    """What one run has measured of one rank, over `steps` steps."""

    @property
    def strategy(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def step_s(self) -> float: ...
    @property
    def micro_batch_s(self) -> float: ...
    @property
    def token_s(self) -> float: ...


def mean(runs: Sequence[MeasuredRun]) -> Speed:
    """The mean cost of the newest runs, weighed by their steps, up to ENOUGH_STEPS; `runs` is not empty, the newest first."""
    weighed = _newest(runs)
    total = sum(steps for _, steps in weighed)
    return Speed(
        sum(run.step_s * steps for run, steps in weighed) / total,
        sum(run.micro_batch_s * steps for run, steps in weighed) / total,
        sum(run.token_s * steps for run, steps in weighed) / total,
    )


def slowdown(ranks: Iterable[Sequence[MeasuredRun]], strategy: str, world_size: int, pass_tokens: float) -> float:
    """How many times as long passes of `pass_tokens` take with this strategy on so many ranks as by `mean`: gathering and the threads of
    the wire cost the rank time, too. One number for all ranks, because it says what the strategy costs; 1 where no run has tried it.
    """
    expected_s, measured_s = 0.0, 0.0
    for runs in ranks:
        same = [run for run in runs if run.world_size == world_size and (world_size == 1 or run.strategy == strategy)]
        usual_s = _pass_s(mean(runs), pass_tokens) if runs else 0.0
        for run, steps in _newest(same):
            expected_s += steps
            measured_s += steps * _pass_s(run, pass_tokens) / usual_s
    return (_PRIOR_STEPS + measured_s) / (_PRIOR_STEPS + expected_s)


def _newest(runs: Sequence[MeasuredRun]) -> list[tuple[MeasuredRun, int]]:
    """The newest runs with the steps that count, together no more than ENOUGH_STEPS."""
    weighed, left = [], ENOUGH_STEPS
    for run in runs:
        if left > 0:
            weighed.append((run, min(run.steps, left)))
            left -= run.steps
    return weighed


def _pass_s(cost: MeasuredRun | Speed, tokens: float) -> float:
    return cost.micro_batch_s + cost.token_s * tokens
