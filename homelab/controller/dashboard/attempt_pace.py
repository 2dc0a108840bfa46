"""How fast one attempt makes its steps: its lines of training come one by one, and of old ones only figures are left. Pure."""

from __future__ import annotations

import math
import statistics
from array import array
from bisect import insort
from collections.abc import Sequence

from homelab.controller.dashboard.step_rate import WINDOW_STEPS
from homelab.shared.protocol.rank_messages import Metric

_FEW_STEPS = 3
_WARM_UP_STEPS = 2  # the first steps of a process are slower than all others
_UNIT = 1074  # every float is a whole number of 2 ** -1074


class FloatByStep:
    """Step -> a number; NaN where there is none."""

    _PART = 6  # 64 steps lie side by side

    def __init__(self) -> None:
        self._parts: dict[int, array[float]] = {}

    def __getitem__(self, step: int) -> float:
        part = self._parts.get(step >> self._PART)
        return math.nan if part is None else part[step & (1 << self._PART) - 1]

    def __setitem__(self, step: int, value: float) -> None:
        number = step >> self._PART
        if number not in self._parts:
            self._parts[number] = array("d", [math.nan] * (1 << self._PART))
        self._parts[number][step & (1 << self._PART) - 1] = value


class RankCourse:
    """One rank: its newest lines, by step and time, and the most memory that it ever held."""

    def __init__(self) -> None:
        self.lines: list[Metric] = []
        self.memory_bytes: int | None = None

    def add(self, line: Metric) -> None:
        insort(self.lines, line, key=lambda entry: (entry.step, entry.time))
        del self.lines[:-WINDOW_STEPS]
        if line.memory_bytes:
            self.memory_bytes = max(self.memory_bytes or 0, line.memory_bytes)


class _BetweenSteps:
    """What passes between steps: by the clock of one rank, beyond what the steps themselves took. The sum is exact, in whatever order steps come."""

    def __init__(self, slowest: FloatByStep) -> None:
        self._slowest = slowest
        self._moments, self._counted = FloatByStep(), FloatByStep()
        self._changed: set[int] = set()
        self._sum = self._count = 0

    def see(self, step: int, moment: float | None) -> None:
        """That the slowest rank of a step is another, or when the rank had done it."""
        self._changed.add(step)
        if moment is not None:
            self._moments[step] = moment
            self._changed.add(step + 1)

    @property
    def mean_s(self) -> float:
        for step in self._changed:
            before_s, now_s = self._counted[step], self._moments[step] - self._moments[step - 1] - self._slowest[step]
            self._sum += _whole(now_s) - _whole(before_s)
            self._count += (not math.isnan(now_s)) - (not math.isnan(before_s))
            self._counted[step] = now_s
        self._changed.clear()
        return max(0.0, self._sum / (1 << _UNIT) / self._count) if self._count else 0.0


class AttemptPace:
    """One attempt."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankCourse] = {}
        self.moved = 0
        """The step after which rows last moved between ranks."""
        self._timed_ranks: set[int] = set()
        self._slowest = FloatByStep()
        # Of the newest steps: how many seconds the slowest rank took, the tokens of all, and of how many ranks that is.
        self._newest: dict[int, tuple[float, int, int]] = {}
        self._between = _BetweenSteps(self._slowest)

    def add(self, line: Metric) -> None:
        """One line of training."""
        if line.rank not in self.ranks:
            self.ranks[line.rank] = RankCourse()
        self.ranks[line.rank].add(line)
        if line.step_s is None:
            return
        if line.rank < min(self._timed_ranks, default=line.rank + 1):
            self._between = _BetweenSteps(self._slowest)
        self._timed_ranks.add(line.rank)
        slowest_s = self._slowest[line.step]
        if math.isnan(slowest_s) or line.step_s > slowest_s:
            self._slowest[line.step] = slowest_s = max(line.step_s, 0.0)
        self._between.see(line.step, line.time if line.rank == min(self._timed_ranks) else None)
        _, tokens, count = self._newest.get(line.step, (0.0, 0, 0))
        self._newest[line.step] = (slowest_s, tokens + (line.tokens or 0), count + 1)
        if len(self._newest) > WINDOW_STEPS + _WARM_UP_STEPS:
            del self._newest[min(self._newest)]

    @property
    def step_s(self) -> float | None:
        """Seconds of a step of the whole: the median of the last ones, each as long as its slowest rank."""
        last = sorted(self._newest)[-WINDOW_STEPS:]
        return statistics.median([self._newest[step][0] for step in last]) if last else None

    def seconds_per_step(self, step_tokens: float | None) -> float | None:
        """The pace of the last steps, and what has come between steps so far.

        The pace is that since rows last moved between ranks (once a few steps are done): what came before says nothing about the steps to
        come. A step takes as long as its slowest rank; one hiccup and one lucky step do not count. Steps hold unequal numbers of tokens:
        where `step_tokens`, those of a typical step, are known, the pace is per token. Saving and evaluating come between steps. None
        while no step is done.
        """
        steps = sorted(self._newest)
        if not steps:
            return None
        warm = steps[_WARM_UP_STEPS:] or steps[-1:]
        since = [step for step in warm if step > self.moved]
        settled = [self._newest[step] for step in (since if len(since) >= _FEW_STEPS else warm)[-WINDOW_STEPS:]]
        # Of the newest step the lines of some ranks may still be missing.
        counted = [(slowest_s, tokens) for slowest_s, tokens, count in settled if tokens and count == len(self._timed_ranks)]
        if step_tokens and counted:
            pace_s = step_tokens * _mean_without_extremes([slowest_s / tokens for slowest_s, tokens in counted])
        else:
            pace_s = _mean_without_extremes([slowest_s for slowest_s, _, _ in settled])
        return pace_s + self._between.mean_s


def _mean_without_extremes(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[1:-1] if len(values) >= 5 else values)


def _whole(value: float) -> int:
    """In units of 2 ** -1074; 0 of what is not a number."""
    if math.isnan(value):
        return 0
    numerator, denominator = value.as_integer_ratio()
    return numerator << _UNIT - (denominator.bit_length() - 1)
