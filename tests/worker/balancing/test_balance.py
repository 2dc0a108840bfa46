"""Measured speeds and the assignment that follows from them, on a simulated cluster whose true speeds are known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import astuple

import pytest

from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.worker.balancing.balancer import Balance, Report
from homelab.worker.balancing.speed_meter import SpeedMeter

TRUE = [Speed(0.05, 0.02, 0.001 / 3), Speed(0.06, 0.03, 0.001 / 1.5), Speed(0.08, 0.02, 0.001)]


class Cluster:
    """Ranks that take as long as their true speeds say, give or take `noise`."""

    def __init__(
        self, true: Sequence[Speed], *, noise: float = 0.02, measured: bool = True, known: Sequence[Speed | None] | None = None
    ) -> None:
        self.true = list(true)
        self.noise = noise
        self.random = random.Random(1)
        known = known or [None] * len(true)
        limits = [Limits(2048)] * len(true)
        names = [f"rank {rank}" for rank in range(len(true))]
        self.balance = Balance([8] * len(true), limits, names, known, measured=measured)
        self.meters = [SpeedMeter(speed) for speed in known]
        self.changes: list[str] = []

    def step(self, lengths: Sequence[int]) -> float:
        """Tokens of the step divided by what the cluster could at best do in the time it took."""
        took: list[float] = []
        reports: list[Report | None] = []
        for rank, true in enumerate(self.true):
            mine = [lengths[row] for row in self.balance.rows_of(lengths, rank)]
            cuts = self.balance.passes_of(mine, rank)
            tokens = [len(cut) * max(mine[row] for row in cut) for cut in cuts]
            passes = [(size, (true.micro_batch_s + true.token_s * size) * self.random.gauss(1, self.noise)) for size in tokens]
            took.append(true.step_s + sum(seconds for _, seconds in passes))
            speed = self.meters[rank].speed
            if speed is None:
                reports.append(None)
            else:
                told = self.balance.announced[rank].seconds(tokens)
                reports.append(Report(speed, sum(tokens), told, speed.seconds(tokens), self.meters[rank].noise))
            self.meters[rank].observe(passes, true.step_s)
        change = self.balance.update([Report.of(report.numbers()) if report else None for report in reports])
        if change:
            self.changes.append(change.because)
        return sum(took) / len(took) / max(took)


def lognormal(draw: random.Random, count: int = 60) -> list[int]:
    return [min(512, max(4, round(draw.lognormvariate(math.log(60), 0.8)))) for _ in range(count)]


def test_ranks_finish_together_after_the_first_steps() -> None:
    cluster, draw = Cluster(TRUE), random.Random(2)
    together = [cluster.step(lognormal(draw)) for _ in range(60)]
    assert sum(together[:3]) / 3 < 0.75, "equal shares wait for the slowest"
    assert sum(together[8:]) / len(together[8:]) > 0.96
    assert cluster.changes[0] == "the speeds are measured now"
    assert len(cluster.changes) <= 4, f"noise is no reason to move rows: {cluster.changes}"


def test_a_throttled_rank_gives_its_rows_to_the_others_within_a_few_steps() -> None:
    cluster, draw = Cluster(TRUE), random.Random(3)
    for _ in range(30):
        cluster.step(lognormal(draw))
    cluster.true[0] = cluster.true[0].slower(3)
    cluster.changes.clear()
    together = [cluster.step(lognormal(draw)) for _ in range(30)]
    assert together[0] < 0.7
    assert min(together[8:]) > 0.9
    assert cluster.changes and cluster.changes[0].startswith("rank 0 is") and "as slow as expected" in cluster.changes[0]
    cluster.true[0] = cluster.true[0].slower(1 / 3)
    cluster.changes.clear()
    together = [cluster.step(lognormal(draw)) for _ in range(30)]
    assert min(together[8:]) > 0.9 and "rank 0 is" in cluster.changes[0] and "as fast as expected" in cluster.changes[0]


SHORT = [speed.slower(1 / 30) for speed in TRUE]  # steps of tens of milliseconds
FEW = [30, 60, 90, 120, 20, 40, 50, 70, 80, 100, 110, 64]


@pytest.mark.parametrize("last_steps", [4, 12])
def test_what_comes_and_goes_on_a_busy_machine_moves_no_rows(last_steps: int) -> None:
    """Other programs take a rank's core for some short steps; over seconds all are as fast as ever."""
    cluster, draw = Cluster(SHORT, noise=0.1), random.Random(8)
    until = [0, 0, 0]
    for step in range(240):
        for rank, speed in enumerate(SHORT):
            if step >= until[rank]:
                cluster.true[rank] = speed
                if draw.random() < 0.04:
                    until[rank] = step + draw.randint(1, last_steps)
                    cluster.true[rank] = speed.slower(draw.uniform(1.5, 3.0))
        cluster.step(FEW)
    assert len(cluster.changes) <= 6, cluster.changes


def test_steps_of_milliseconds_answer_a_slowed_rank_within_seconds() -> None:
    quick = [speed.slower(1 / 10) for speed in TRUE]
    cluster = Cluster(quick, noise=0.05)
    for _ in range(150):
        cluster.step(FEW)
    cluster.true[0] = quick[0].slower(3)
    cluster.changes.clear()
    passed_s, steps = 0.0, 0
    while not cluster.changes:
        before = cluster.balance.speeds[0]
        tokens = [FEW[row] for row in cluster.balance.rows_of(FEW, 0)]
        passed_s += 3 * before.seconds(tokens)
        steps += 1
        assert passed_s < 8.0, f"no answer after {steps} steps"
        cluster.step(FEW)
    assert cluster.changes[0].startswith("rank 0 is") and "as slow as expected" in cluster.changes[0]


def test_rows_that_were_moved_stay_for_a_while() -> None:
    balance = Balance([4, 4], [Limits(100)] * 2, ["a", "b"], [None, None], measured=True)
    even = [Report(TRUE[0], 100, 1.0, 1.0, 0.01), Report(TRUE[0], 100, 1.0, 1.0, 0.01)]
    slow = [Report(TRUE[0].slower(2), 100, 1.0, 2.0, 0.01), even[1]]
    assert balance.update(even) is not None
    assert balance.update(slow) is not None and balance.speeds[0] == TRUE[0].slower(2), "the first measurement holds nothing back"
    back = [Report(TRUE[0], 100, 2.0, 1.0, 0.01), even[1]]
    told = [balance.update(back) is not None for _ in range(6)]
    assert told[:4] == [False] * 4 and sum(told) >= 1
    assert balance.speeds[0] == TRUE[0]


def test_short_steps_are_measured_together() -> None:
    meter = SpeedMeter(None)
    for step in range(202):
        meter.observe([(100, 0.1 if 100 <= step < 106 else 0.04)], 0.01)
    assert meter.speed is not None and math.isfinite(meter.noise)
    assert meter.speed.seconds([100]) == pytest.approx(0.05 + 0.06 * 6 / 200, rel=0.03), "6 steps of 200 are no pace"


def test_in_the_first_seconds_single_steps_are_all_there_is() -> None:
    meter = SpeedMeter(None)
    for step in range(24):
        meter.observe([(100, 0.04 if step < 12 else 0.4)], 0.01)
        assert math.isinf(meter.noise) == (step < 4)
    assert meter.speed is not None and meter.speed.seconds([100]) == pytest.approx(0.41, rel=0.01), "the fast ones are forgotten"


def test_a_slowdown_of_all_ranks_moves_nothing() -> None:
    cluster, draw = Cluster(TRUE, noise=0.0), random.Random(4)
    for _ in range(30):
        cluster.step(lognormal(draw))
    cluster.changes.clear()
    cluster.true = [speed.slower(2) for speed in cluster.true]
    for _ in range(20):
        cluster.step(lognormal(draw))
    assert cluster.changes == []


def test_known_speeds_are_right_from_the_first_step() -> None:
    cluster, draw = Cluster(TRUE, known=TRUE), random.Random(5)
    assert cluster.step(lognormal(draw)) > 0.95


def test_fixed_shares_are_never_changed() -> None:
    cluster, draw = Cluster(TRUE, measured=False), random.Random(6)
    for _ in range(20):
        lengths = lognormal(draw, 24)
        assert [len(cluster.balance.rows_of(lengths, rank)) for rank in range(3)] == [8, 8, 8]
        cluster.step(lengths)
    assert cluster.changes == []


def test_nothing_is_compared_before_every_rank_has_measured_something() -> None:
    balance = Balance([4, 4], [Limits(100)] * 2, ["a", "b"], [None, None], measured=True)
    report = Report(TRUE[0], 100, 1.0, 9.0, 0.0)
    assert balance.update([report, None]) is None
    assert Report.of([0.0] * 7) is None
    assert balance.update([report, report]) is not None


def test_the_meter_finds_both_parts_of_the_cost() -> None:
    meter, draw = SpeedMeter(None), random.Random(7)
    for _ in range(40):
        sizes = [draw.randint(20, 800) for _ in range(6)]
        meter.observe([(size, (0.05 + 0.001 * size) * draw.gauss(1, 0.03)) for size in sizes], 0.2)
    speed = meter.speed
    assert speed is not None
    assert speed.token_s == pytest.approx(0.001, rel=0.05) and speed.micro_batch_s == pytest.approx(0.05, rel=0.3)
    assert speed.step_s == pytest.approx(0.2)
    assert speed.seconds([400, 400]) == pytest.approx(0.2 + 2 * 0.45, rel=0.03)


def test_passes_of_one_size_keep_what_was_believed_of_their_parts() -> None:
    meter = SpeedMeter(Speed(0.0, 0.1, 0.001))
    for _ in range(10):
        meter.observe([(100, 0.4)] * 4, 0.0)
    assert meter.speed is not None and astuple(meter.speed) == pytest.approx((0.0, 0.2, 0.002, 0.0))


def test_the_meter_passes_over_the_warm_up_and_steps_without_rows() -> None:
    meter = SpeedMeter(None)
    for _ in range(2):
        meter.observe([(100, 60.0)], 1.0)
    assert meter.speed is None
    meter.observe([], 1.0)
    assert meter.speed is None
    meter.observe([(100, 1.0)], 1.0)
    assert meter.speed is not None and math.isinf(meter.noise)


def test_one_disturbed_step_is_not_a_new_pace() -> None:
    meter = SpeedMeter(None)
    for step in range(20):
        meter.observe([(100, 3.0 if step == 12 else 1.0)] * 3, 0.0)
    assert meter.speed is not None
    assert meter.speed.seconds([100]) == pytest.approx(1.0 + 2.0 / 18, rel=0.01)
