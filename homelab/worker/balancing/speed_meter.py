"""How fast this rank is, from what it just did: seconds = a + b x tokens for each forward and backward pass. Pure.

Two things are measured apart, because they change apart. How a and b divide (what a pass costs beside its tokens, in tokens) belongs to
the hardware and the model: it is fitted over a long memory. The pace (seconds per token so counted) is what a hot laptop or a busy
desktop changes from one minute to the next: it is taken over the last steps, fewer where it has just changed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.shared.law.speed import Speed

LEAST_S = 1.0  # of work: other programs of a shared machine disturb for tenths of a second, so shorter steps are measured together
WINDOW_STEPS = 20  # long enough to average the noise of a busy machine
RECENT_STEPS = 3  # long enough not to believe a single slow step
CHANGED = 0.15  # a pace that differs this much from the window's, and more than its noise explains, is a new pace
SETTLING_STEPS = 2  # the first steps of a process pay for its warm-up: lazy initialisation, caches, page faults
PASS_TOKENS = 64.0  # assumed cost of a pass beside its tokens before it is measured: as much as so many tokens
_MEMORY_PASSES = 400
_PRIOR_PASSES = 16  # the assumption about a and b weighs as much as so many passes

Pass = tuple[int, float]  # tokens (padding included), seconds


@dataclass(frozen=True, slots=True)
class _Step:
    """An optimizer step; or as many short ones as make up LEAST_S of work. `rest_s` is of each."""

    passes: tuple[Pass, ...]
    rest_s: tuple[float, ...]

    @property
    def work_s(self) -> float:
        return sum(seconds for _, seconds in self.passes)

    def pace(self, pass_tokens: float) -> float:
        """Seconds per token, where a pass counts as `pass_tokens` more."""
        return sum(seconds for _, seconds in self.passes) / sum(tokens + pass_tokens for tokens, _ in self.passes)


class SpeedMeter:
    """Remembers the passes of the last steps of one rank and says what they cost. `known`: its speed in an earlier run, or None."""

    def __init__(self, speed: Speed | None) -> None:
        # Of what the host needs, half is believed to hide behind the card's work, until passes of several sizes tell.
        self.pass_tokens = max(speed.micro_batch_s, speed.floor_s / 2) / speed.token_s if speed else PASS_TOKENS
        self._believed_pass_tokens = self.pass_tokens
        self._memory: deque[Pass] = deque(maxlen=_MEMORY_PASSES)  # seconds divided by the pace of their step
        self._steps: deque[_Step] = deque(maxlen=WINDOW_STEPS)
        self._pieces: deque[_Step] = deque(maxlen=WINDOW_STEPS)  # of at least LEAST_S each; steps that are long enough are the same
        self._open: _Step | None = None  # the short steps that do not make up a piece yet
        self._seen = 0

    def observe(self, passes: Sequence[Pass], rest_s: float) -> None:
        """One optimizer step: each forward and backward pass that held rows, and the seconds outside of passes and communication."""
        self._seen += 1
        if self._seen <= SETTLING_STEPS or not passes or not all(0 < seconds < math.inf for _, seconds in passes):
            return
        step = _Step(tuple(passes), (max(0.0, rest_s),))
        pace = step.pace(self.pass_tokens)
        self._memory.extend((tokens, seconds / pace) for tokens, seconds in passes)
        self.pass_tokens = pass_tokens(self._memory, self._believed_pass_tokens)
        self._open = step if self._open is None else _Step(self._open.passes + step.passes, self._open.rest_s + step.rest_s)
        if self._open.work_s >= LEAST_S:
            self._pieces.append(self._open)
            self._open = None
            if recent := self._another_pace(self._pieces):
                self._pieces = deque(recent, maxlen=WINDOW_STEPS)
        self._steps.append(step)
        if len(self._pieces) < RECENT_STEPS and (recent := self._another_pace(self._steps)):
            self._steps, self._open = deque(recent, maxlen=WINDOW_STEPS), None
            self._pieces.clear()

    @property
    def _window(self) -> deque[_Step]:
        """The measurements that count: pieces; single steps only in the first seconds of a run."""
        return self._pieces if len(self._pieces) >= RECENT_STEPS else self._steps

    def _another_pace(self, window: Sequence[_Step]) -> list[_Step]:
        """The recent measurements when all of them lie on one side of the earlier ones. A single disturbed one is not a new pace."""
        before, recent = list(window)[:-RECENT_STEPS], list(window)[-RECENT_STEPS:]
        if len(before) < RECENT_STEPS:
            return []
        earlier = [step.pace(self.pass_tokens) for step in before]
        usual = statistics.median(earlier)
        noise = statistics.median(abs(pace / usual - 1) for pace in earlier)
        apart = 1 + max(CHANGED, 4 * noise)
        ratios = [step.pace(self.pass_tokens) / usual for step in recent]
        return recent if min(ratios) > apart or max(ratios) < 1 / apart else []

    @property
    def speed(self) -> Speed | None:
        """The speed by the last steps; None before the first."""
        if not self._window:
            return None
        # The mean, not the median: disturbances are part of a rank's speed.
        pace = statistics.fmean(step.pace(self.pass_tokens) for step in self._window)
        return Speed(statistics.median(rest_s for step in self._window for rest_s in step.rest_s), pace * self.pass_tokens, pace)

    @property
    def noise(self) -> float:
        """Standard error of the pace relative to it; infinite where there are too few steps to tell."""
        paces = [step.pace(self.pass_tokens) for step in self._window]
        if len(paces) < RECENT_STEPS:
            return math.inf
        return statistics.stdev(paces) / statistics.fmean(paces) / math.sqrt(len(paces))


def pass_tokens(passes: Sequence[Pass], believed: float) -> float:
    """What a pass costs beside its tokens, in tokens: a / b of the line seconds = a + b x tokens.

    Least squares of relative errors. `believed` enters as _PRIOR_PASSES more passes on its own line at the smallest and at the
    largest size, so that passes of one size, which cannot tell a from b, leave it as it is.
    """
    smallest, largest = min(tokens for tokens, _ in passes), max(tokens for tokens, _ in passes)
    pace = sum(seconds for _, seconds in passes) / sum(tokens + believed for tokens, _ in passes)
    weighed = [(1 / seconds**2, tokens, seconds) for tokens, seconds in passes]
    for tokens in (smallest, largest):
        seconds = pace * (tokens + believed)
        weighed.append((_PRIOR_PASSES / 2 / seconds**2, tokens, seconds))
    total = sum(weight for weight, _, _ in weighed)
    mean_tokens = sum(weight * tokens for weight, tokens, _ in weighed) / total
    mean_s = sum(weight * seconds for weight, _, seconds in weighed) / total
    spread = sum(weight * (tokens - mean_tokens) ** 2 for weight, tokens, _ in weighed)
    if spread <= 0:
        return believed
    slope = sum(weight * (tokens - mean_tokens) * (seconds - mean_s) for weight, tokens, seconds in weighed) / spread
    if slope <= 0:
        return believed
    return max(0.0, mean_s / slope - mean_tokens)
