"""When to save: every so many steps where the recipe says so, else by the clock, from what a save was measured to cost. Pure.

Every rank holds an Interval and feeds it the same gathered numbers (as `homelab.worker.balance`), so all of them save after the same
step without a word more. Which steps are saved changes nothing in the training.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

COST = 0.035  # the part of the time that saving may take
LOSS_S = 120.0  # the work that a fault may lose
LEAST_S = 15.0  # saving more often than this wears out a disk for nothing: starting anew takes as long
FAULT_EVERY_S = 3600.0  # a pessimist's guess for machines at home
UNMEASURED_S = 60.0  # to the first save of an attempt that goes on and does not know what one costs
# The first automatic save is after this step and in the foreground: a disk that is full or read-only shows at once, what a save costs
# is known, and whoever has done one step more proves that a checkpoint exists (`homelab.runs.policy.may_begin_again`).
FIRST_STEP = 1
BACKGROUND_BYTES = 64 << 20  # a smaller state is on the disk in half a second: no thread, no second copy
NUMBERS = 4


def seconds(stall_s: float, write_s: float = 0.0) -> float:
    """Seconds from the end of one save to the next, where a save halts the training for `stall_s` and the disk is busy for `write_s`.

    Between the bounds it is where saving and doing work again cost least together: sqrt(2 x cost x time between faults) (J. W. Young,
    A first order approximation to the optimum checkpoint interval, Comm. ACM 17(9), 1974). What is lost is at most LOSS_S, and what
    a save costs at most COST of the time. The two contradict each other where a save halts for more than 4.2 s: then the cost
    wins, for it is paid always, and the loss only by a fault (with fewer than two faults an hour it is also what costs less).
    """
    best = max(LEAST_S, math.sqrt(2 * stall_s * FAULT_EVERY_S))
    return max(_least_s(stall_s, write_s), min(best, LOSS_S - write_s))


def loses_more(stall_s: float, write_s: float) -> bool:
    """Saving costs so much here that a fault may lose more than LOSS_S."""
    return _least_s(stall_s, write_s) + write_s > LOSS_S


def _least_s(stall_s: float, write_s: float) -> float:
    return max(stall_s / COST, write_s)  # the next save would wait for the last one


def saves(every_steps: int | None, steps: int, resume_step: int, step_s: float, stall_s: float) -> int:
    """How many checkpoints a run writes from `resume_step` to its last step `steps`, which is always saved: what the plan predicts."""
    if every_steps is not None:
        return -(-steps // every_steps) - resume_step // every_steps
    between = max(1, int(seconds(stall_s) / step_s)) if step_s > 0 else steps
    first = int(resume_step < FIRST_STEP <= steps)
    return first + -(-(steps - max(resume_step, FIRST_STEP)) // between) if steps > resume_step else 0


class Interval:
    """Says after which steps a checkpoint is due. All times are of one monotonic clock of this rank, in seconds.

    `every_steps` None: by the clock. `known_s`: how long a save halted this run before, where that is known.
    """

    def __init__(self, every_steps: int | None, known_s: float | None = None) -> None:
        self.every_steps = every_steps
        self._known_s = known_s or 0.0
        self._stalls_s: deque[float] = deque(maxlen=3)
        self._write_s = 0.0
        self._since = 0.0
        self._elapsed_s = self._step_s = self.stall_s = self.write_s = 0.0  # of the slowest rank, as last gathered

    def begin(self, now: float) -> None:
        """Work that a fault would lose is done from now on."""
        self._since = now

    def saved(self, now: float, stall_s: float, write_s: float) -> None:
        """A save has halted this rank for `stall_s`; the last one that is whole took `write_s` on the disk (0: this rank writes none)."""
        self._stalls_s.append(stall_s)
        self._write_s = write_s
        self._since = now

    @property
    def own_stall_s(self) -> float | None:
        """How long a save halts this rank: the median of the last ones, one that was slow is no rule. None where nobody knows."""
        return statistics.median(self._stalls_s) if self._stalls_s else self._known_s or None

    def numbers(self, now: float, step_s: float) -> list[float]:
        """What this rank tells the others in a step: NUMBERS of them. `step_s`: how long its last step took."""
        return [now - self._since, step_s if math.isfinite(step_s) else 0.0, self.own_stall_s or 0.0, self._write_s]

    def update(self, everyone: Sequence[Sequence[float]]) -> None:
        """`numbers` of all ranks, the same on all of them."""
        slowest = [max(of_all) for of_all in zip(*everyone, strict=True)]
        self._elapsed_s, self._step_s, self.stall_s, self.write_s = slowest

    @property
    def interval_s(self) -> float:
        """Seconds to the next save."""
        return seconds(self.stall_s, self.write_s) if self.stall_s else UNMEASURED_S

    def is_due(self, step: int, *, last: bool) -> bool:
        """Save after this step: the last one, one that the recipe names, or the last before the next would make it too late."""
        if last or self.every_steps is not None:
            return last or step % (self.every_steps or 1) == 0
        if step == FIRST_STEP:
            return True
        is_late = self._elapsed_s + self._step_s > self.interval_s
        return is_late and self._elapsed_s >= _least_s(self.stall_s, self.write_s)
