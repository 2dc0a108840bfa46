"""Which rows are trained in which step, and by which rank. Pure Python: the same on every node, whatever its versions.

The law of the project stands here. The order of the rows depends on the seed and the number of rows alone; a step is a fixed
slice of that order. Which rank computes which rows of the slice depends on shares or speeds, and on nothing that changes the sum.

    order of epoch e       permutation(seed, e, rows)
    step s (from 0)        epoch s // steps_per_epoch, slice number s % steps_per_epoch of `global_batch` rows
    rows -> ranks          assign(): so that all ranks finish together, neighbours in length together
    rows -> micro-batches  micro_batches(): longest together, at the least cost
"""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.worker.speed import Speed

_BISECTIONS = 8  # of the time in which all ranks can end; the range is about a fifth of it
_CLOSE = 0.002


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """A shuffled order of range(count) for this epoch (0-based).

    Fisher and Yates (Durstenfeld 1964) on `random.random()`: Python keeps that stream stable over its versions, which it does not
    promise for `random.shuffle`, and nodes may run different Pythons.
    """
    stream = random.Random(f"homelab order {seed} {epoch}").random
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(stream() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Optimizer steps of one epoch of `count` rows. The last one may be smaller: no row is dropped."""
    return math.ceil(count / global_batch)


def step_rows(step: int, *, seed: int, count: int, global_batch: int) -> tuple[int, tuple[int, ...]]:
    """(epoch, rows) of optimizer step `step` (0-based): index arithmetic that knows nothing of ranks."""
    epoch, slice_number = divmod(step, steps_per_epoch(count, global_batch))
    start = slice_number * global_batch
    return epoch, permutation(seed, epoch, count)[start : start + global_batch]


def quotas(rows: int, shares: Sequence[int]) -> list[int]:
    """Rows for each rank: its share, scaled down for a smaller batch by largest remainder (Hamilton's method), ties to the lower rank.

    The sum is `rows`, and no rank gets more than its share as long as `rows` is at most the sum of the shares.
    """
    total = sum(shares)
    assert total > 0, "no rank has a share"
    whole = [rows * share // total for share in shares]
    remainders = [rows * share % total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-remainders[rank], rank))
    for rank in by_remainder[: rows - sum(whole)]:
        whole[rank] += 1
    return whole


@dataclass(frozen=True, slots=True)
class Limits:
    """What one forward pass of a rank may hold: tokens, rows (None: any), and the longest row it takes at all.

    `padded`: the rows of a pass are padded to the longest of them, and the padding counts.
    """

    pass_tokens: int
    pass_rows: int | None = None
    row_tokens: int | None = None
    padded: bool = True

    def takes(self, length: int) -> bool:
        """Whether a row of this length can be computed here."""
        return self.row_tokens is None or length <= self.row_tokens

    def tokens(self, rows: int, longest: int, total: int) -> int:
        """What a pass computes: so many rows of together `total` tokens, padding included where there is any."""
        return rows * longest if self.padded else total

    def holds(self, rows: int, tokens: int) -> bool:
        """Whether one pass may hold so many rows and tokens. A single row always passes: `takes` is what refuses it."""
        return rows == 1 or (tokens <= self.pass_tokens and (self.pass_rows is None or rows <= self.pass_rows))


def assign(
    lengths: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], rows_of: Sequence[int] | None = None
) -> list[list[int]]:
    """For each rank, the positions in `lengths` (tokens of each row of a global batch) that it computes, longest first.

    `rows_of` fixes the number of rows of every rank; without it only speed decides: the better of two ways, by what the slowest
    rank will need, padding included. A rank that would get nothing takes the shortest row it can, or its speed could not be
    measured. Ties go to the earlier row and the lower rank, so every rank computes the same answer. A row that no rank takes goes
    to those that take the longest rows.
    """
    assert len(speeds) == len(limits) and (rows_of is None or sum(rows_of) == len(lengths))
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    found = _soonest(lengths, order, speeds, limits, rows_of)
    if rows_of is None and len(speeds) > 1:
        found = _neighbours(lengths, order, speeds, limits, found)
        if len(lengths) >= len(speeds):
            _feed_idle(lengths, limits, found)
    return found


def _soonest(
    lengths: Sequence[int], order: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], rows_of: Sequence[int] | None
) -> list[list[int]]:  # fmt: skip
    """Rows longest first to the rank that would finish soonest (list scheduling on uniform machines: Graham 1969, Gonzalez, Ibarra
    and Sahni 1977). What a row costs is what it adds: its tokens in a pass of its own, or in the open pass, padded to its longest row.
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
    """Each rank a run of rows that are neighbours in length, where the slowest rank then ends before that of `other`; else `other`.

    Rows of like length share passes with little padding: with lengths as different as those of chats, three ranks came to 0.97
    of their speeds alone, and to 0.87 where every rank had rows of all lengths (simulated from measured costs). Ranks that take
    the longest rows come first, the faster of them before the slower. The time in which all can end is found by bisection.
    """
    ranks = sorted(
        range(len(speeds)), key=lambda rank: (-(limits[rank].row_tokens or math.inf), speeds[rank].token_s, rank)
    )
    ordered = [lengths[position] for position in order]

    def runs(most_s: float) -> list[list[int]] | None:
        rows: list[list[int]] = [[] for _ in speeds]
        at = 0
        for rank in ranks:
            end = at + _longest_prefix(ordered[at:], speeds[rank], limits[rank], most_s)
            rows[rank] = list(order[at:end])
            at = end
        return rows if at == len(order) else None

    best, high = other, max(_passes_s(rows, lengths, speeds[rank], limits[rank]) for rank, rows in enumerate(other))
    low = (sum(lengths) + sum(speed.step_s / speed.token_s for speed in speeds)) / sum(
        1 / speed.token_s for speed in speeds
    )
    for _ in range(_BISECTIONS):
        if high - low <= _CLOSE * high:
            break
        middle = (low + high) / 2
        found = runs(middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _longest_prefix(ordered: Sequence[int], speed: Speed, limits: Limits, most_s: float) -> int:
    """How many of these rows, longest first, one rank can compute within `most_s`."""
    if ordered and not limits.takes(ordered[0]):
        return 0
    best = [speed.step_s]
    for end in range(1, len(ordered) + 1):
        seconds, _ = _last_pass(ordered, end, best, speed, limits)
        if seconds > most_s:
            return end - 1
        best.append(seconds)
    return len(ordered)


def _feed_idle(lengths: Sequence[int], limits: Sequence[Limits], rows: list[list[int]]) -> None:
    """Ranks without a row take the shortest one that another rank can spare."""
    for idle in (rank for rank in range(len(rows)) if not rows[rank]):
        givers = [
            rank for rank in range(len(rows)) if len(rows[rank]) > 1 and limits[idle].takes(lengths[rows[rank][-1]])
        ]
        if givers:
            giver = min(givers, key=lambda rank: (lengths[rows[rank][-1]], rank))
            rows[idle].append(rows[giver].pop())


def _roomiest(ranks: Sequence[int], limits: Sequence[Limits]) -> list[int]:
    most = max(limits[rank].row_tokens or 0 for rank in ranks)
    return [rank for rank in ranks if (limits[rank].row_tokens or 0) == most]


def _added_s(
    speed: Speed, limits: Limits, open_pass: tuple[int, int, int], length: int
) -> tuple[float, tuple[int, int, int]]:
    """(seconds that a row adds, the open pass after it): it joins the open pass, whose first row is the longest, or begins another."""
    rows, longest, total = open_pass
    alone = speed.micro_batch_s + speed.token_s * length
    tokens = limits.tokens(rows + 1, longest, total + length)
    joined = speed.token_s * (tokens - limits.tokens(rows, longest, total))
    if rows and joined <= alone and limits.holds(rows + 1, tokens):
        return joined, (rows + 1, longest, total + length)
    return alone, (1, length, length)


def micro_batches(rows: Sequence[int], lengths: Sequence[int], speed: Speed, limits: Limits) -> list[list[int]]:
    """Cut one rank's rows into passes within `limits` at the least cost: padding against the fixed cost of one more pass.

    `lengths[i]` is the length of `rows[i]`. Longest together; exact by dynamic programming over the sorted rows (a pass is a
    run of them, because a shorter row in between pads no more). The first pass holds the longest row: a shortage of memory
    shows at once.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    ordered = [lengths[i] for i in order]
    best = [0.0]
    cut_at = [0]
    for end in range(1, len(ordered) + 1):
        seconds, start = _last_pass(ordered, end, best, speed, limits)
        best.append(seconds)
        cut_at.append(start)
    passes: list[list[int]] = []
    end = len(order)
    while end:
        passes.insert(0, [rows[i] for i in order[cut_at[end] : end]])
        end = cut_at[end]
    return passes


def _passes_s(rows: Sequence[int], lengths: Sequence[int], speed: Speed, limits: Limits) -> float:
    """Seconds of a step with these rows (positions in `lengths`, longest first), cut at the least cost."""
    ordered = [lengths[row] for row in rows]
    best = [speed.step_s]
    for end in range(1, len(ordered) + 1):
        best.append(_last_pass(ordered, end, best, speed, limits)[0])
    return best[-1]


def _last_pass(
    ordered: Sequence[int], end: int, best: Sequence[float], speed: Speed, limits: Limits
) -> tuple[float, int]:
    """(least seconds of the first `end` rows, where their last pass begins), given those of all fewer rows."""
    shortest = ordered[end - 1]
    least, cut, total = math.inf, end - 1, 0
    for start in range(end - 1, -1, -1):
        longest = ordered[start]
        total += longest
        tokens = limits.tokens(end - start, longest, total)
        if not limits.holds(end - start, tokens):
            break
        # The shortest row alone would cost less than its padding here, and from here on rows only get longer.
        if limits.padded and speed.token_s * (longest - shortest) > speed.micro_batch_s:
            break
        seconds = best[start] + speed.micro_batch_s + speed.token_s * tokens
        if seconds <= least:
            least, cut = seconds, start
    return least, cut


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put rows into bins of at most `capacity` tokens: best fit, decreasing (Johnson 1973). Every row is in exactly one bin.

    Ties go to the earlier row and the earlier bin. A row longer than `capacity` is our mistake: rows are cut to seq_len before.
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
