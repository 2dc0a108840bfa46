"""When to save: every so many steps where the recipe says so, else by the clock, from the measured cost of a save.

Every rank holds an Interval and feeds it the same gathered numbers, so all ranks save after the same step without another message. Which
steps are saved changes nothing in the training.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

COST = 0.035  # the part of the time that saving may take
LOSS_S = 120.0  # the work that a fault may lose
LEAST_S = 15.0  # a shorter interval wears out the disk and gains nothing: a restart takes as long
FAULT_EVERY_S = 3600.0  # a pessimistic guess for machines at home
UNMEASURED_S = 60.0  # to the first save of an attempt that resumes and does not know what a save costs
# The first automatic save comes after this step and in the foreground. It shows at once whether the disk is full or read-only, it measures
# what a save costs, and a run that has done one step more has a checkpoint (`homelab.controller.features.supervise.restart_policy.may_begin_again`).
FIRST_STEP = 1
BACKGROUND_BYTES = 64 << 20  # a smaller state is on the disk in half a second: no thread, no second copy
NUMBERS = 5


def seconds(stall_s: float, write_s: float = 0.0) -> float:
    """Seconds from the end of one save to the next, where a save halts the training for `stall_s` and the disk is busy for `write_s`.

    Between the bounds it minimises the cost of saving and repeated work together: sqrt(2 x cost x time between faults) (J. W. Young,
    A first order approximation to the optimum checkpoint interval, Comm. ACM 17(9), 1974). A fault loses at most LOSS_S, and saving
    costs at most COST of the time. The two contradict each other where a save halts for more than 4.2 s. Then the cost wins: it is
    paid always, the loss only after a fault (with fewer than two faults an hour it is also what costs less).
    """
    best = max(LEAST_S, math.sqrt(2 * stall_s * FAULT_EVERY_S))
    return max(_least_s(stall_s, write_s), min(best, LOSS_S - write_s))


def loses_more(stall_s: float, write_s: float) -> bool:
    """Whether saving costs so much that a fault may lose more than LOSS_S."""
    return _least_s(stall_s, write_s) + write_s > LOSS_S


def _least_s(stall_s: float, write_s: float) -> float:
    return max(stall_s / COST, write_s)  # the next save would wait for the last one


def saves(every_steps: int | None, steps: int, resume_step: int, step_s: float, stall_s: float, keep_every: int | None = None) -> int:
    """How many checkpoints a run writes from `resume_step` to its last step `steps`, which is always saved; those that are kept for good may come on top."""
    if keep_every is not None:
        others = saves(every_steps, steps, resume_step, step_s, stall_s)
        both = _multiples(math.lcm(every_steps, keep_every), resume_step, steps) if every_steps is not None else 0
        return others + _multiples(keep_every, resume_step, steps) - both
    if every_steps is not None:
        return -(-steps // every_steps) - resume_step // every_steps
    between = max(1, int(seconds(stall_s) / step_s)) if step_s > 0 else steps
    first = int(resume_step < FIRST_STEP <= steps)
    return first + -(-(steps - max(resume_step, FIRST_STEP)) // between) if steps > resume_step else 0


def _multiples(of: int, after: int, before: int) -> int:
    """How many multiples there are between the two steps, without them."""
    return max(0, (before - 1) // of - after // of)


class Interval:
    """Decides after which steps a checkpoint is due. All times are seconds of one monotonic clock of this rank.

    `every_steps` None: by the clock. `known_s`: how long a save halted this run in an earlier attempt, None where that is not known.
    `keep_every`: [checkpoint] keep_every.
    """

    def __init__(self, every_steps: int | None, known_s: float | None = None, keep_every: int | None = None) -> None:
        self.every_steps = every_steps
        self._keep_every = keep_every
        self._known_s = known_s or 0.0
        self._stalls_s: deque[float] = deque(maxlen=3)
        self._write_s = 0.0
        self._since = 0.0
        self._elapsed_s = self._step_s = self.stall_s = self.write_s = 0.0  # of the slowest rank, as last gathered
        self.is_asked = False
        """Somebody wants a checkpoint after this step: a node was asked for it, and said it in the last gathering."""

    def begin(self, now: float) -> None:
        """Count the work that a fault would lose from now on."""
        self._since = now

    def saved(self, now: float, stall_s: float, write_s: float) -> None:
        """A save has halted this rank for `stall_s`; the last complete one took `write_s` on the disk (0: this rank writes none)."""
        self._stalls_s.append(stall_s)
        self._write_s = write_s
        self._since = now

    @property
    def own_stall_s(self) -> float | None:
        """How long a save halts this rank: the median of the last ones, so that one slow save does not count. None: not known."""
        return statistics.median(self._stalls_s) if self._stalls_s else self._known_s or None

    def numbers(self, now: float, step_s: float, *, is_asked: bool = False) -> list[float]:
        """What this rank sends to the others in a step: NUMBERS of them. `step_s`: how long its last step took. `is_asked`: its node was asked for a
        checkpoint.
        """
        return [now - self._since, step_s if math.isfinite(step_s) else 0.0, self.own_stall_s or 0.0, self._write_s, float(is_asked)]

    def update(self, everyone: Sequence[Sequence[float]]) -> None:
        """Take in the `numbers` of all ranks, the same on all of them."""
        self._elapsed_s, self._step_s, self.stall_s, self.write_s, is_asked = (max(of_all) for of_all in zip(*everyone))
        self.is_asked = is_asked > 0

    @property
    def interval_s(self) -> float:
        """Seconds to the next save."""
        return seconds(self.stall_s, self.write_s) if self.stall_s else UNMEASURED_S

    def is_due(self, step: int, *, last: bool) -> bool:
        """Whether to save after this step: the last one, one that was asked for, one that the recipe names, or the last before the next would make it
        too late.
        """
        if self.is_asked or (self._keep_every is not None and step % self._keep_every == 0):
            return True
        if last or self.every_steps is not None:
            return last or step % (self.every_steps or 1) == 0
        if step == FIRST_STEP:
            return True
        is_late = self._elapsed_s + self._step_s > self.interval_s
        return is_late and self._elapsed_s >= _least_s(self.stall_s, self.write_s)
