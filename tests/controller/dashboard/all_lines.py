"""The figures of a dashboard from all lines at once: slow, and plain enough to be right."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from homelab.controller.dashboard.step_rate import WINDOW_STEPS
from homelab.shared.protocol.rank_messages import Metric

WARM_UP_STEPS, FEW_STEPS = 2, 3


def in_order(lines: Iterable[Metric]) -> list[Metric]:
    return sorted(lines, key=lambda line: (line.attempt, line.step, line.time))


def loss_history(lines: Sequence[Metric]) -> list[tuple[int, float]]:
    """Steps in order, of the newest attempt that made each."""
    losses: dict[int, float] = {}
    attempts: dict[int, int] = {}
    for line in in_order(line for line in lines if line.kind == "train"):
        if line.attempt > max(attempts.values(), default=line.attempt):
            losses = {step: loss for step, loss in losses.items() if step < line.step}
            attempts = {step: attempt for step, attempt in attempts.items() if step < line.step}
        if line.loss is not None:
            losses[line.step], attempts[line.step] = line.loss, line.attempt
    return sorted(losses.items())


def eval_losses(lines: Sequence[Metric]) -> list[tuple[int, float]]:
    return sorted({line.step: line.eval_loss for line in in_order(lines) if line.kind == "eval" and line.eval_loss is not None}.items())


def rank_lines(lines: Sequence[Metric], attempt: int) -> dict[int, list[Metric]]:
    ranks: dict[int, list[Metric]] = {}
    for line in in_order(lines):
        if line.kind == "train" and line.attempt == attempt:
            ranks.setdefault(line.rank, []).append(line)
    return ranks


def step_s(lines: Sequence[Metric], attempt: int) -> float | None:
    slowest: dict[int, float] = {}
    for line in lines:
        if line.kind == "train" and line.attempt == attempt and line.step_s is not None:
            slowest[line.step] = max(slowest.get(line.step, 0.0), line.step_s)
    return statistics.median([slowest[step] for step in sorted(slowest)[-WINDOW_STEPS:]]) if slowest else None


def eta_s(lines: Sequence[Metric], step: int, total: int, step_tokens: float | None) -> float | None:
    lines = in_order(lines)
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
    warm = sorted(slowest)[WARM_UP_STEPS:] or [max(slowest)]
    since = [number for number in warm if number > moved]
    settled = (since if len(since) >= FEW_STEPS else warm)[-WINDOW_STEPS:]
    counted = [number for number in settled if number in whole and tokens[number]]
    if step_tokens and counted:
        pace = step_tokens * without_extremes([slowest[number] / tokens[number] for number in counted])
    else:
        pace = without_extremes([slowest[number] for number in settled])
    first = min(line.rank for line in train)
    times = {line.step: line.time for line in train if line.rank == first}
    between = [times[after] - times[before] - slowest[after] for before, after in itertools.pairwise(sorted(times)) if after == before + 1]
    return max(0, total - step) * (pace + (max(0.0, statistics.fmean(between)) if between else 0.0))


def without_extremes(values: Sequence[float]) -> float:
    return statistics.fmean(sorted(values)[1:-1] if len(values) >= 5 else values)
