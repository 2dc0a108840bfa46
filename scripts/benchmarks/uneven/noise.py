"""What no sharing of rows can reach: a step ends with its slowest rank, and a processor is not equally fast in every step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Work = Sequence[tuple[int, float]]  # one rank: tokens and seconds of computing, step after step


def ceiling(ranks: Sequence[Work]) -> float:
    """Throughput over the sum of the ranks' speeds, if every rank had the rows that its mean speed earns: 1 / the mean over the steps of the
    slowest rank's factor.

    A rank's factor in a step is its seconds per token over its mean ones. 1.0: no rank has noise, or there is one rank.
    """
    factors = []
    for work in ranks:
        usual_s = sum(seconds for _, seconds in work) / sum(tokens for tokens, _ in work)
        factors.append([seconds / (tokens * usual_s) for tokens, seconds in work])
    return 1 / statistics.fmean(max(of_step) for of_step in zip(*factors, strict=True))
