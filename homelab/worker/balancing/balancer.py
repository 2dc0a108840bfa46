"""Who computes what, step after step: the speeds that are believed, and when what was measured replaces them. Pure.

Every rank holds a Balance and feeds it the same gathered numbers, so all of them come to the same decision without another message. A
new assignment never changes the gradient; it may begin at any step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homelab.shared.law import assignment, order, packing
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.worker.balancing.speed_meter import PASS_TOKENS

WORTH_ANNOUNCING = 0.05  # ranks that would finish further apart than this by the speeds last announced are an event
NOISE_FACTOR = 3.0  # beside so many standard errors, because the test runs after every step and for every rank
HOLD_S = 5.0  # of work: moved rows stay this long, otherwise a short disturbance would move them back and forth


REPORT_NUMBERS = 7  # of `Report.numbers`


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank says of itself after a step: its measured speed, the tokens of this step's passes, their seconds by the speed
    last announced and as measured, and the standard error of the measurement relative to it (infinite: too few steps). Sent around as
    numbers.
    """

    speed: Speed
    tokens: int
    announced_s: float
    measured_s: float
    noise: float

    def numbers(self) -> list[float]:
        """For a collective; `of` reads them back."""
        return [self.speed.step_s, self.speed.micro_batch_s, self.speed.token_s, self.tokens, self.announced_s, self.measured_s, self.noise]

    @staticmethod
    def of(numbers: Sequence[float]) -> Report | None:
        """Read the numbers back; None for a rank that has measured nothing yet."""
        return Report(Speed(*numbers[:3]), int(numbers[3]), *numbers[4:]) if numbers[3] else None


@dataclass(frozen=True, slots=True)
class Rebalancing:
    """A new assignment rule: why, the speeds from now on, and each rank's portion of the tokens where all finish together."""

    because: str
    speeds: tuple[Speed, ...]
    portions: tuple[float, ...]


class Balance:
    """The assignment rule of a run. `measured` False: the shares are fixed, and nothing is ever changed.

    `shares` are rows of a full global batch per rank, `speeds` what is believed of each rank at the start; None where nothing is.
    """

    def __init__(
        self, shares: Sequence[int], limits: Sequence[Limits], names: Sequence[str], speeds: Sequence[Speed | None], *, measured: bool
    ) -> None:  # fmt: skip
        assert len(shares) == len(limits) == len(names) == len(speeds)
        self.shares = tuple(shares)
        self.limits = tuple(limits)
        self.names = tuple(names)
        self.measured = measured
        known_speeds = [speed for speed in speeds if speed is not None]
        self.is_estimated = len(known_speeds) < len(shares)
        self.speeds = tuple(from_share(share) for share in shares) if self.is_estimated else tuple(known_speeds)
        self.announced = self.speeds  # by the last event, or by the plan
        self._is_own = False  # the speeds were measured in this run
        self.recorded: Mapping[str, str] = {}
        """Step -> the passes of another run that are repeated (`chain.passes_text`)."""
        self._since_s = math.inf  # work of the slowest rank since rows were last moved

    def join_rows(self) -> None:
        """The rows of a pass are not padded from now on, on any rank. Before the first step."""
        self.limits = tuple(dataclasses.replace(limits, padded=False) for limits in self.limits)

    def cuts_of(self, lengths: Sequence[int], recorded: Sequence[Sequence[int]] = ()) -> list[list[list[int]]]:
        """Rank -> its forward passes -> their positions in `lengths` (rows of a global batch, in tokens).

        `recorded`: the passes of another run, which are repeated where each of them fits a rank.
        """
        fixed = None if self.measured else order.quotas(len(lengths), self.shares)
        positions_of = assignment.assign(lengths, self.speeds, self.limits, fixed)
        own = [
            [[positions[place] for place in cut] for cut in self.passes_of([lengths[position] for position in positions], rank)]
            for rank, positions in enumerate(positions_of)
        ]
        same = sorted(map(sorted, itertools.chain(*own))) == sorted(map(sorted, recorded))
        return own if same or not recorded else self._repeated(lengths, recorded) or own

    def _repeated(self, lengths: Sequence[int], recorded: Sequence[Sequence[int]]) -> list[list[list[int]]] | None:
        """Each pass to the rank that would be done with it first, the largest first; None where one fits no rank."""
        done_s = [speed.step_s for speed in self.speeds]
        cuts: list[list[list[int]]] = [[] for _ in self.speeds]
        by_length = [sorted(positions, key=lambda position: (-lengths[position], position)) for positions in recorded]
        for positions in sorted(by_length, key=lambda positions: -sum(lengths[position] for position in positions)):
            longest, total = lengths[positions[0]], sum(lengths[position] for position in positions)
            tokens_of = [limits.tokens(len(positions), longest, total) for limits in self.limits]
            able = [
                rank for rank, limits in enumerate(self.limits)
                if self.shares[rank] and limits.takes(longest) and limits.holds(len(positions), tokens_of[rank])
            ]  # fmt: skip
            if not able:
                return None
            first = min(able, key=lambda rank: (done_s[rank] + self.speeds[rank].pass_s(tokens_of[rank]), rank))
            done_s[first] += self.speeds[first].pass_s(tokens_of[first])
            cuts[first].append(positions)
        return cuts

    def rows_of(self, lengths: Sequence[int], rank: int) -> list[int]:
        """The positions in `lengths` (rows of a global batch, in tokens) that `rank` computes."""
        fixed = None if self.measured else order.quotas(len(lengths), self.shares)
        return assignment.assign(lengths, self.speeds, self.limits, fixed)[rank]

    def passes_of(self, lengths: Sequence[int], rank: int) -> list[list[int]]:
        """The positions in `lengths` (this rank's rows, in tokens), cut into forward passes."""
        return packing.micro_batches(range(len(lengths)), lengths, self.speeds[rank], self.limits[rank])

    def update(self, reports: Sequence[Report | None]) -> Rebalancing | None:
        """Believe what was measured, from the next step on; the Change where it is one worth telling.

        Small corrections come with every step. A Change is when the ranks would finish further apart by the speeds last announced than
        noise explains, and not right after another; a slowdown that all ranks share is none. Speeds of an earlier run are believed
        until every rank has measured more than a step or two of its own.
        """
        known_reports = [report for report in reports if report is not None]
        if not self.measured or len(known_reports) < len(self.speeds):
            return None
        self._since_s += max(report.measured_s for report in known_reports)
        speeds = tuple(report.speed for report in known_reports)
        if not self.is_estimated and any(math.isinf(report.noise) for report in known_reports):
            self.speeds = speeds if self._is_own else self.speeds
            return None
        ratios = [report.measured_s / report.announced_s for report in known_reports]
        common = sum(report.measured_s for report in known_reports) / sum(report.announced_s for report in known_reports)
        apart = max(
            abs(ratio / common - 1) - (0 if self.is_estimated else NOISE_FACTOR * report.noise)
            for ratio, report in zip(ratios, known_reports, strict=True)
        )
        if not self.is_estimated:
            if apart >= WORTH_ANNOUNCING and self._since_s < HOLD_S:
                return None
            self._is_own, self.speeds = True, speeds
            if apart < WORTH_ANNOUNCING:
                return None
            self._since_s = 0.0
        if self.is_estimated:
            because = "the speeds are measured now"
        else:
            # The rank whose pace changed most, not the one that is furthest from the others: three are ahead when the fourth slows down.
            changed = max(range(len(ratios)), key=lambda rank: (abs(math.log(ratios[rank])), -rank))
            ratio = ratios[changed]
            because = f"{self.names[changed]} is {max(ratio, 1 / ratio):.2f} times as {'slow' if ratio > 1 else 'fast'} as expected"
        self._is_own, self.speeds, self.announced = True, speeds, speeds
        self.is_estimated = False
        rates = [report.tokens / report.measured_s for report in known_reports]
        return Rebalancing(because, self.speeds, tuple(rate / sum(rates) for rate in rates))


def from_share(share: int) -> Speed:
    """The speed that a share stands for while nothing is measured, in arbitrary units."""
    token_s = 1 / max(share, 1)
    return Speed(0.0, PASS_TOKENS * token_s, token_s)
