"""Whole runs on paper: whatever the lengths, speeds, shares, ranks, memory and interruptions, the law of rows and batches holds.

No model and no process: the assignment rule of the worker (`Balance`) over `order.step_rows`, with speeds that change as measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.shared.law import order
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.worker.balancing.balancer import Balance, Report

pytestmark = pytest.mark.timeout(60)

times = st.floats(0.0, 1.0)
speeds_of_a_rank = st.builds(Speed, times, times, st.floats(1e-6, 1e-2))


@dataclass(frozen=True)
class Attempt:
    """One attempt: its first step, its assignment rule, and what its ranks measure after some of its steps."""

    first: int
    balance: Balance
    measured: dict[int, list[Speed | None]]


@dataclass(frozen=True)
class Run:
    """A recipe's numbers, and the attempts it took."""

    seed: int
    lengths: list[int]
    global_batch: int
    epochs: int
    attempts: list[Attempt]

    @property
    def steps(self) -> int:
        return self.epochs * order.steps_per_epoch(len(self.lengths), self.global_batch)


@st.composite
def balances(draw: st.DrawFn, global_batch: int, longest: int) -> Balance:
    """Of one to five ranks: shares that sum to the global batch, or speeds that are measured, known or not; memory for one row at least
    on one rank, and less on others."""
    ranks = draw(st.integers(1, 5))
    cuts = sorted(draw(st.lists(st.integers(0, global_batch), min_size=ranks - 1, max_size=ranks - 1)))
    shares = [high - low for low, high in zip([0, *cuts], [*cuts, global_batch], strict=True)]
    limits = []
    for rank in range(ranks):
        cap = draw(st.none() | st.integers(1, 4 * longest)) if rank else None
        room = cap or draw(st.integers(longest, 8 * longest))
        limits.append(Limits(room, draw(st.none() | st.integers(1, 8)), cap))
    joined = draw(st.booleans())
    order = draw(st.permutations(range(ranks)))
    speeds = draw(st.lists(st.none() | speeds_of_a_rank, min_size=ranks, max_size=ranks))
    names = [f"rank {rank}" for rank in range(ranks)]
    balance = Balance(shares, [limits[place] for place in order], names, speeds, measured=draw(st.booleans()))
    if joined:
        balance.join_rows()
    return balance


@st.composite
def runs(draw: st.DrawFn) -> Run:
    lengths = draw(st.lists(st.integers(1, 512), min_size=1, max_size=60))
    global_batch, epochs = draw(st.integers(1, 20)), draw(st.integers(1, 3))
    steps = epochs * order.steps_per_epoch(len(lengths), global_batch)
    firsts = [0, *sorted(draw(st.sets(st.integers(1, steps), max_size=2)))]
    attempts = []
    for first in firsts:
        balance = draw(balances(global_batch, max(lengths)))
        told = st.lists(st.none() | speeds_of_a_rank, min_size=len(balance.shares), max_size=len(balance.shares))
        attempts.append(Attempt(first, balance, draw(st.dictionaries(st.integers(first, steps), told, max_size=4))))
    return Run(draw(st.integers(0, 2**32 - 1)), lengths, global_batch, epochs, attempts)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(run=runs())
def test_whoever_computes_what_every_row_is_trained_once_per_epoch_in_the_same_batches(run: Run) -> None:
    trained: dict[int, list[int]] = {epoch: [] for epoch in range(run.epochs)}
    per_epoch = order.steps_per_epoch(len(run.lengths), run.global_batch)
    for attempt, last in zip(run.attempts, [*(later.first for later in run.attempts[1:]), run.steps], strict=True):
        for step in range(attempt.first, last):
            epoch, batch = order.step_rows(step, seed=run.seed, count=len(run.lengths), global_batch=run.global_batch)
            assert epoch == step // per_epoch
            # The batch is a slice of a permutation that knows the seed, the epoch and the number of rows, and no more.
            start = step % per_epoch * run.global_batch
            assert batch == order.permutation(run.seed, epoch, len(run.lengths))[start : start + run.global_batch]
            trained[epoch] += one_step(run, attempt.balance, batch)
            if step in attempt.measured:
                learn(attempt.balance, attempt.measured[step])
    assert all(sorted(rows) == list(range(len(run.lengths))) for rows in trained.values())


def one_step(run: Run, balance: Balance, batch: tuple[int, ...]) -> list[int]:
    """The rows that the ranks compute, all together; each rank's work is checked."""
    lengths = [run.lengths[row] for row in batch]
    roomiest = max(limits.row_tokens or math.inf for limits in balance.limits)
    rows: list[int] = []
    counts = []
    for rank, limits in enumerate(balance.limits):
        mine = balance.rows_of(lengths, rank)
        own = [lengths[position] for position in mine]
        passes = balance.passes_of(own, rank)
        assert sorted(position for cut in passes for position in cut) == list(range(len(own)))
        for cut in passes:
            longest = max(own[position] for position in cut)
            tokens = len(cut) * longest if limits.padded else sum(own[position] for position in cut)
            assert len(cut) == 1 or tokens <= limits.pass_tokens
            assert limits.pass_rows is None or len(cut) <= limits.pass_rows
            # Only with fixed shares may a rank have to take a row that is too long for it: the shares leave nobody else.
            assert longest <= (limits.row_tokens or math.inf) or not balance.measured or longest > roomiest
        # A rank without a row has no pass here, and computes a stand-in without weight (batches.StepBatches).
        assert bool(passes) == bool(own)
        rows += [batch[position] for position in mine]
        counts.append(len(mine))
    if not balance.measured:
        assert counts == order.quotas(len(batch), balance.shares)
    elif len(batch) >= len(counts) and all(limits.row_tokens is None for limits in balance.limits):
        assert min(counts) >= 1, "everybody has something to be measured by"
    return rows


def learn(balance: Balance, measured: list[Speed | None]) -> None:
    """What `Balance.update` is told after a step; ranks without a row in it say nothing."""
    fixed = balance.speeds
    reports = []
    for speed, believed in zip(measured, balance.speeds, strict=True):
        reports.append(Report(speed, 100, believed.seconds([100]), speed.seconds([100]), noise=0.0) if speed else None)
    change = balance.update(reports)
    if not balance.measured or None in reports:
        assert change is None and balance.speeds == fixed
    if change:
        assert balance.speeds == change.speeds == tuple(measured)
        assert sum(change.portions) == pytest.approx(1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 80), batch=st.integers(1, 30), resume=st.integers(0, 200)
)  # fmt: skip
def test_resuming_is_index_arithmetic(seed: int, count: int, batch: int, resume: int) -> None:
    """The steps from `resume` on are those of an undisturbed run, without a look at what came before."""
    undisturbed = [order.step_rows(step, seed=seed, count=count, global_batch=batch) for step in range(resume + 5)]
    assert [order.step_rows(step, seed=seed, count=count, global_batch=batch) for step in range(resume, resume + 5)] == undisturbed[resume:]
