"""The lines of metrics.jsonl of all ranks and attempts, merged, and the curves in them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from homelab.controller.dashboard.snapshot import LossPoint
from homelab.controller.remote.poll_reply import Metric, Reply


def of_reply(reply: Reply) -> Iterable[Metric]:
    """All lines that this node sent."""
    if reply.run:
        for rank in reply.run.ranks.values():
            yield from rank.metrics


def merged(lines: Iterable[Metric]) -> list[Metric]:
    """Each line once, by attempt and step; what was done again in a later attempt replaces what came before."""
    kept: dict[tuple[Any, ...], Metric] = {}
    for line in lines:
        key = (line.kind, line.attempt, line.rank, line.step, line.message)
        kept[key] = line
    return sorted(kept.values(), key=lambda line: (line.attempt, line.step, line.time))


def loss_history(train: Sequence[Metric]) -> tuple[LossPoint, ...]:
    """Steps in order, of the newest attempt that made each. All ranks write the same global loss."""
    losses: dict[int, float] = {}
    attempts: dict[int, int] = {}
    for line in train:
        if line.attempt > max(attempts.values(), default=line.attempt):
            # A later attempt began before steps that an earlier one had reached: those were undone.
            losses = {step: loss for step, loss in losses.items() if step < line.step}
            attempts = {step: attempt for step, attempt in attempts.items() if step < line.step}
        if line.loss is not None:
            losses[line.step], attempts[line.step] = line.loss, line.attempt
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(losses.items()))


def eval_losses(lines: Sequence[Metric]) -> tuple[LossPoint, ...]:
    """The loss on the held-out rows, by step."""
    by_step = {line.step: line.eval_loss for line in lines if line.kind == "eval" and line.eval_loss is not None}
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(by_step.items()))


def by_rank(train: Iterable[Metric], attempt: int) -> dict[int, list[Metric]]:
    """Rank -> its lines of this attempt."""
    of_rank: dict[int, list[Metric]] = {}
    for line in train:
        if line.attempt == attempt:
            of_rank.setdefault(line.rank, []).append(line)
    return of_rank
