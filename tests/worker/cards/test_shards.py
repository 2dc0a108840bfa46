"""A divided model on cards: a pass ends with this rank's last gradient, not with the sums over the ranks, so that shares find the speed of a card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.worker.balancing.balancer import Balance, Report
from homelab.worker.balancing.speed_meter import SpeedMeter
from homelab.worker.runtime import step_timer
from homelab.worker.strategies.sharded import exchange

COMPUTE, SUMS = "compute", "sums"
ROWS, TOKENS = 24, 512


@dataclass
class Streams:
    """Two streams of a card in virtual time; events are recorded in the one that is named, or in the one that is current."""

    at_s: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, SUMS: 0.0})
    current: str = COMPUTE

    def event(self, **_options: Any) -> Event:
        return Event(self)

    def sum_parts(self, seconds: float) -> None:
        """The other stream begins behind what is computed now."""
        self.at_s[SUMS] = max(self.at_s.values()) + seconds


@dataclass
class Event:
    streams: Streams
    at_s: float = 0.0

    def record(self, stream: str | None = None) -> None:
        self.at_s = self.streams.at_s[stream or self.streams.current]

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at_s - self.at_s)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: COMPUTE)
    monkeypatch.setattr(exchange, "sum_parts", lambda *_tensors, async_op: made.sum_parts(0.5))
    return made


def timed_step(streams: Streams, passes_s: list[float], others_s: float) -> step_timer.StepTimer:
    """Passes of two blocks each. In the last one both are summed; `backward()` ends when the sums are there, `others_s` after this rank's own."""
    timer, sent = step_timer.StepTimer("cuda"), exchange.Exchange()
    sent.timer = timer
    for number, pass_s in enumerate(passes_s):
        with timer.one_pass():
            for _ in range(2):
                streams.at_s[COMPUTE] += pass_s / 2
                if number == len(passes_s) - 1:
                    streams.current = SUMS
                    sent.scatter("block")(torch.zeros(1), torch.zeros(2), None, dist.ReduceOp.SUM)
                    streams.current = COMPUTE
            if number == len(passes_s) - 1:
                streams.at_s[COMPUTE] = max(streams.at_s.values()) + others_s
    timer.gradients_reduced()
    return timer


def test_the_last_pass_ends_with_the_last_gradient(streams: Streams) -> None:
    timer = timed_step(streams, [2.0, 2.0], others_s=5.0)
    assert timer.passes_s == pytest.approx([2.0, 2.0])
    assert timer.communication_s == pytest.approx(5.5)


def test_shares_find_unequal_cards(streams: Streams) -> None:
    """Cards of 2 to 1 that begin with 12 rows each end with 16 and 8."""
    seconds_per_token = (1e-3, 2e-3)
    limits = [Limits.planned(2, None, seq_len=TOKENS, asked="auto") for _ in seconds_per_token]
    balance = Balance((ROWS // 2, ROWS // 2), limits, ["fast", "slow"], [Speed(0.0, 0.05, 1.5e-3)] * 2, measured=True)
    meters = [SpeedMeter(balance.speeds[rank]) for rank in range(2)]
    for _ in range(40):
        own = [
            [len(cut) * TOKENS for cut in balance.passes_of([TOKENS] * len(balance.rows_of([TOKENS] * ROWS, rank)), rank)]
            for rank in range(2)
        ]
        busy = [[0.05 + tokens * seconds_per_token[rank] for tokens in own[rank]] for rank in range(2)]
        end_s = max(map(sum, busy))
        reports: list[Report | None] = []
        for rank, meter in enumerate(meters):
            speed = meter.speed
            announced = balance.announced[rank]
            reports.append(
                speed
                if speed is None
                else Report(speed, sum(own[rank]), announced.seconds(own[rank]), speed.seconds(own[rank]), meter.noise)
            )
            timer = timed_step(streams, busy[rank], others_s=end_s - sum(busy[rank]))
            meter.observe(list(zip(own[rank], timer.passes_s, strict=True)), 0.01)
        balance.update(reports)
    assert [len(balance.rows_of([TOKENS] * ROWS, rank)) for rank in range(2)] == [16, 8]
