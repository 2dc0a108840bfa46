"""How the rows of one rank become forward passes, and how rows are joined to samples of one length."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed


def micro_batches(rows: Sequence[int], lengths: Sequence[int], speed: Speed, limits: Limits) -> list[list[int]]:
    """Cut one rank's rows into passes within `limits` at the least cost: padding against the fixed cost of one more pass.

    `lengths[i]` is the length of `rows[i]`. Rows of like length share a pass. The cost is the least by dynamic programming over the sorted
    rows (a pass is a run of them, because a shorter row in between pads no more). The first pass holds the longest row, so that a
    shortage of memory shows at once.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    ordered = [lengths[i] for i in order]
    best = [0.0]
    cut_at = [0]
    for end in range(1, len(ordered) + 1):
        seconds, start = last_pass(ordered, end, best, speed, limits)
        best.append(seconds)
        cut_at.append(start)
    passes: list[list[int]] = []
    end = len(order)
    while end:
        passes.insert(0, [rows[i] for i in order[cut_at[end] : end]])
        end = cut_at[end]
    return passes


def passes_s(rows: Sequence[int], lengths: Sequence[int], speed: Speed, limits: Limits) -> float:
    """Seconds of a step with these rows (positions in `lengths`, longest first), cut at the least cost."""
    ordered = [lengths[row] for row in rows]
    best = [speed.step_s]
    for end in range(1, len(ordered) + 1):
        best.append(last_pass(ordered, end, best, speed, limits)[0])
    return best[-1]


def last_pass(ordered: Sequence[int], end: int, best: Sequence[float], speed: Speed, limits: Limits) -> tuple[float, int]:
    """(least seconds of the first `end` rows, where their last pass begins), given those of all fewer rows."""
    least, cut, total = math.inf, end - 1, 0
    alone_s = speed.pass_s(ordered[end - 1])
    # A plan comes here millions of times.
    tokens_of, holds, pass_s, token_s = limits.tokens, limits.holds, speed.pass_s, speed.token_s
    for start in range(end - 1, -1, -1):
        longest = ordered[start]
        total += longest
        tokens = tokens_of(end - start, longest, total)
        if not holds(end - start, tokens):
            break
        # The shortest row alone would cost less than its padding here, and the rows before this one are longer still.
        if limits.padded and token_s * longest > alone_s:
            break
        seconds = best[start] + pass_s(tokens)
        if seconds <= least:
            least, cut = seconds, start
    return least, cut


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put rows into bins of at most `capacity` tokens: best fit, decreasing (Johnson 1973). Every row is in exactly one bin.

    Ties go to the earlier row and the earlier bin. No row may be longer than `capacity`: rows are cut to seq_len before.
    """
    assert all(length <= capacity for length in lengths)
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), kept sorted
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = bisect.bisect_left(rooms, (lengths[row], -1))
        if place == len(rooms):
            bins.append([row])
            room, number = capacity - lengths[row], len(bins) - 1
        else:
            room, number = rooms.pop(place)
            bins[number].append(row)
            room -= lengths[row]
        bisect.insort(rooms, (room, number))
    return bins
