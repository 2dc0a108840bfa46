"""How long the steps of an attempt take, as seen from outside. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from homelab.controller.attempt.watchdog import NodeStatus

_KEPT = 200


class StepTimeWindow:
    """The seconds between steps, from the moments at which the newest step was first seen.

    `earlier_step_s`: what another supervisor measured in this attempt, None where there is nothing.
    """

    def __init__(self, earlier_step_s: float | None = None) -> None:
        self._earlier_step_s = earlier_step_s
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._step: int | None = None
        self._at = 0.0

    def see(self, signs: Mapping[str, NodeStatus], now_s: float) -> None:
        """Look at the newest signs; `now_s` is monotonic."""
        steps = [rank.step for sign in signs.values() for rank in sign.ranks.values() if rank.phase == "training"]
        if not steps:
            self._step = None  # saving and evaluating are no part of a step
            return
        newest = max(steps)
        if self._step is not None and newest > self._step:
            self._seconds.append((now_s - self._at) / (newest - self._step))
        if newest != self._step:
            self._step, self._at = newest, now_s

    @property
    def step_s(self) -> float | None:
        """The 99th percentile; before two steps were seen what was known before, None where that is nothing."""
        if len(self._seconds) < 2:
            return self._earlier_step_s
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
