"""Which rank computes which rows of a global batch: all ranks finish together, neighbours in length lie together.

The assignment changes nothing in the sum over the batch. It depends on lengths, speeds, limits and quotas alone, so every rank computes the same one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from homelab.shared.law.limits import Limits
from homelab.shared.law.packing import last_pass, passes_s
from homelab.shared.law.speed import Speed

_BISECTIONS = 8  # of the time in which all ranks can end; the range is about a fifth of it
_CLOSE = 0.002


def assign(
    lengths: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], rows_of: Sequence[int] | None = None
) -> list[list[int]]:
    """For each rank, the positions in `lengths` (tokens of each row of a global batch) that it computes, longest first.

    `rows_of` fixes the number of rows of every rank. Without it speed decides: of list scheduling and runs of neighbours, the way in
    which the slowest rank ends first, padding included. A rank that would get nothing takes the shortest row it can, because the speed of
    an idle rank cannot be measured. Ties go to the earlier row and the lower rank. A row that is too long for every rank goes to the
    ranks that take the longest rows.
    """
    assert len(speeds) == len(limits) and (rows_of is None or sum(rows_of) == len(lengths))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    rows = _soonest(lengths, order, speeds, limits, rows_of)
    if rows_of is None and len(speeds) > 1:
        rows = _neighbours(lengths, order, speeds, limits, rows)
        if len(lengths) >= len(speeds):
            _feed_idle(lengths, limits, rows)
    return rows


def _soonest(
    lengths: Sequence[int], order: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], rows_of: Sequence[int] | None
) -> list[list[int]]:  # fmt: skip
    """Rows longest first, each to the rank that would finish soonest (list scheduling on uniform machines: Graham 1969, Gonzalez, Ibarra
    and Sahni 1977). A row costs what it adds: its tokens in a pass of its own, or in the open pass, padded to the longest row there.
    """
    left = None if rows_of is None else list(rows_of)
    finish = [speed.step_s for speed in speeds]
    open_pass = [(0, 0, 0)] * len(speeds)  # (rows, longest, tokens of all) of the pass that the next row may join
    rows: list[list[int]] = [[] for _ in speeds]
    for position in order:
        length = lengths[position]
        able = [rank for rank in range(len(speeds)) if left is None or left[rank]]
        able = [rank for rank in able if limits[rank].takes(length)] or _roomiest(able, limits)
        added = {rank: _added_s(speeds[rank], limits[rank], open_pass[rank], length) for rank in able}
        rank = min(able, key=lambda rank: (finish[rank] + added[rank][0], rank))
        seconds, open_pass[rank] = added[rank]
        finish[rank] += seconds
        rows[rank].append(position)
        if left is not None:
            left[rank] -= 1
    return rows


def _neighbours(
    lengths: Sequence[int], order: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], other: list[list[int]]
) -> list[list[int]]:  # fmt: skip
    """A run of rows that are neighbours in length for each rank, where the slowest rank then ends before that of `other`; else `other`.

    Rows of like length share passes with little padding. With lengths as different as those of chats, three ranks reach 0.97 of their
    speeds alone; they reach 0.87 where every rank has rows of all lengths (simulated from measured costs). Ranks that take the
    longest rows come first, the faster of them before the slower. Bisection finds the time in which all can end.
    """
    ranks = sorted(range(len(speeds)), key=lambda rank: (-(limits[rank].row_tokens or math.inf), speeds[rank].token_s, rank))
    ordered = [lengths[position] for position in order]

    def runs_within(most_s: float) -> list[list[int]] | None:
        rows: list[list[int]] = [[] for _ in speeds]
        start = 0
        for rank in ranks:
            end = start + _longest_prefix(ordered[start:], speeds[rank], limits[rank], most_s)
            rows[rank] = list(order[start:end])
            start = end
        return rows if start == len(order) else None

    best, high = other, max(passes_s(rows, lengths, speeds[rank], limits[rank]) for rank, rows in enumerate(other))
    tokens_per_s = sum(1 / speed.token_s for speed in speeds)
    low = (sum(lengths) + sum(speed.step_s / speed.token_s for speed in speeds)) / tokens_per_s
    for _ in range(_BISECTIONS):
        if high - low <= _CLOSE * high:
            break
        middle = (low + high) / 2
        runs = runs_within(middle)
        if runs is None:
            low = middle
        else:
            best, high = runs, middle
    return best


def _longest_prefix(ordered: Sequence[int], speed: Speed, limits: Limits, most_s: float) -> int:
    """How many of these rows, longest first, one rank can compute within `most_s`."""
    if ordered and not limits.takes(ordered[0]):
        return 0
    best = [speed.step_s]
    for end in range(1, len(ordered) + 1):
        seconds, _ = last_pass(ordered, end, best, speed, limits)
        if seconds > most_s:
            return end - 1
        best.append(seconds)
    return len(ordered)


def _feed_idle(lengths: Sequence[int], limits: Sequence[Limits], rows: list[list[int]]) -> None:
    """Give every rank without a row the shortest one that another rank can spare."""
    for idle in (rank for rank in range(len(rows)) if not rows[rank]):
        givers = [rank for rank in range(len(rows)) if len(rows[rank]) > 1 and limits[idle].takes(lengths[rows[rank][-1]])]
        if givers:
            giver = min(givers, key=lambda rank: (lengths[rows[rank][-1]], rank))
            rows[idle].append(rows[giver].pop())


def _roomiest(ranks: Sequence[int], limits: Sequence[Limits]) -> list[int]:
    """Those of `ranks` that take the longest rows."""
    most = max(limits[rank].row_tokens or 0 for rank in ranks)
    return [rank for rank in ranks if (limits[rank].row_tokens or 0) == most]


def _added_s(speed: Speed, limits: Limits, open_pass: tuple[int, int, int], length: int) -> tuple[float, tuple[int, int, int]]:
    """(seconds that a row adds, the open pass after it): it joins the open pass, whose first row is the longest, or starts another."""
    rows, longest, total = open_pass
    alone = speed.pass_s(length)
    tokens = limits.tokens(rows + 1, longest, total + length)
    joined = speed.pass_s(tokens) - speed.pass_s(limits.tokens(rows, longest, total))
    if rows and joined <= alone and limits.holds(rows + 1, tokens):
        return joined, (rows + 1, longest, total + length)
    return alone, (1, length, length)
