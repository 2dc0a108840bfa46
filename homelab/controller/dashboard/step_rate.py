"""How fast the last steps were, and when a run will be done, from the metrics of all ranks. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from homelab.controller.planning.types import Plan
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import Reply

_FEW_STEPS = 3
_WARM_UP_STEPS = 2  # the first steps of a process are slower than all others
WINDOW_STEPS = 20


def tokens_per_s(lines: Sequence[Metric]) -> float | None:
    """Of one rank, over its last steps: one step alone has many or few tokens, and jumps from picture to picture."""
    last = [line for line in lines[-WINDOW_STEPS:] if line.tokens_per_s is not None]
    timed = [(line.tokens, line.step_s) for line in last if line.tokens is not None and line.step_s]
    if last and len(timed) == len(last):
        return sum(tokens for tokens, _ in timed) / sum(step_s for _, step_s in timed)
    return statistics.fmean([line.tokens_per_s or 0.0 for line in last]) if last else None


def step_s(train: Sequence[Metric], attempt: int) -> float | None:
    """Seconds of a step of the whole: the median of the last ones, each as long as its slowest rank."""
    slowest: dict[int, float] = {}
    for line in train:
        if line.attempt == attempt and line.step_s is not None:
            slowest[line.step] = max(slowest.get(line.step, 0.0), line.step_s)
    return statistics.median([slowest[step] for step in sorted(slowest)[-WINDOW_STEPS:]]) if slowest else None


def efficiency(plan: Plan | None, reached_tokens_per_s: float | None) -> tuple[float | None, float | None]:
    """(reached, planned): the speed of all together as a fraction of the sum of the ranks alone; None where the plan knows no speeds."""
    alone = sum(rank.alone_tokens_per_s for rank in plan.time.ranks) if plan and plan.time else 0.0
    if plan is None or plan.time is None or alone <= 0:
        return None, None
    return (reached_tokens_per_s / alone if reached_tokens_per_s is not None else None), plan.time.efficiency


def checkpoint_age_s(step: int, lines: Sequence[Metric], replies: Mapping[str, Reply]) -> float | None:
    """Seconds since this step was saved, by the clock of the node that says so; None where no answer tells, or that clock was set back."""
    saved = {line.rank: line.time for line in lines if line.kind == "save" and line.step == step}
    for reply in replies.values():
        for rank in sorted(reply.run.ranks if reply.run else ()):
            if rank in saved and reply.time >= saved[rank]:
                return reply.time - saved[rank]
    return None


def eta_s(lines: Sequence[Metric], step: int, total: int | None, step_tokens: float | None = None) -> float | None:
    """Seconds to the end: the remaining steps at the pace of the last ones, and what has come between steps so far.

    `lines` are metrics of all ranks in order. The pace is that of the newest attempt since rows last moved between ranks (once a few
    steps are done): what came before says nothing about the steps to come. A step takes as long as its slowest rank; one hiccup
    and one lucky step do not count. Steps hold unequal numbers of tokens: where `step_tokens`, those of a typical step, are known,
    the pace is per token. Saving and evaluating come between steps. None while no step is done.
    """
    if total is None:
        return None
    attempt = max((line.attempt for line in lines if line.kind == "train"), default=0)
    train = [line for line in lines if line.kind == "train" and line.attempt == attempt and line.step_s is not None]
    if not train:
        return None
    slowest: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for line in train:
        slowest[line.step] = max(slowest.get(line.step, 0.0), line.step_s or 0.0)
        tokens[line.step] = tokens.get(line.step, 0) + (line.tokens or 0)
    ranks = len({line.rank for line in train})
    whole = {number for number, count in Counter(line.step for line in train).items() if count == ranks}
    moved = max((line.step for line in lines if line.kind == "shares" and line.attempt == attempt), default=0)
    warm = sorted(slowest)[_WARM_UP_STEPS:] or [max(slowest)]
    since = [number for number in warm if number > moved]
    settled = (since if len(since) >= _FEW_STEPS else warm)[-WINDOW_STEPS:]
    # Of the newest step the lines of some ranks may still be missing.
    counted = [number for number in settled if number in whole and tokens[number]]
    if step_tokens and counted:
        pace = step_tokens * _mean_without_extremes([slowest[number] / tokens[number] for number in counted])
    else:
        pace = _mean_without_extremes([slowest[number] for number in settled])
    return max(0, total - step) * (pace + _between_s(train, slowest))


def _mean_without_extremes(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[1:-1] if len(values) >= 5 else values)


def _between_s(train: Sequence[Metric], slowest: dict[int, float]) -> float:
    """Seconds per step that passed between the steps: by the clock of one rank, beyond what the steps themselves took."""
    first = min(line.rank for line in train)
    times = {line.step: line.time for line in train if line.rank == first}
    between = [times[after] - times[before] - slowest[after] for before, after in itertools.pairwise(sorted(times)) if after == before + 1]
    return max(0.0, statistics.fmean(between)) if between else 0.0
