"""How fast the last steps were, from the metrics of all ranks. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from homelab.controller.planning.types import Plan
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import Reply

WINDOW_STEPS = 20


def tokens_per_s(lines: Sequence[Metric]) -> float | None:
    """Of one rank, over its last steps: one step alone has many or few tokens, and jumps from picture to picture."""
    last = [line for line in lines[-WINDOW_STEPS:] if line.tokens_per_s is not None]
    timed = [(line.tokens, line.step_s) for line in last if line.tokens is not None and line.step_s]
    if last and len(timed) == len(last):
        return sum(tokens for tokens, _ in timed) / sum(step_s for _, step_s in timed)
    return statistics.fmean([line.tokens_per_s or 0.0 for line in last]) if last else None


def efficiency(plan: Plan | None, reached_tokens_per_s: float | None) -> tuple[float | None, float | None]:
    """(reached, planned): the speed of all together as a fraction of the sum of the ranks alone; None where the plan knows no speeds."""
    alone = sum(rank.alone_tokens_per_s for rank in plan.time.ranks) if plan and plan.time else 0.0
    if plan is None or plan.time is None or alone <= 0:
        return None, None
    return (reached_tokens_per_s / alone if reached_tokens_per_s is not None else None), plan.time.efficiency


def checkpoint_age_s(saved: Mapping[int, float], replies: Mapping[str, Reply]) -> float | None:
    """Seconds since a step was saved, by the clock of the node that says so; None where no answer tells, or that clock was set back.

    `saved`: rank -> when.
    """
    for reply in replies.values():
        for rank in sorted(reply.run.ranks if reply.run else ()):
            if rank in saved and reply.time >= saved[rank]:
                return reply.time - saved[rank]
    return None
