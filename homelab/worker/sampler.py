"""Which rows are trained in which step, and by which rank. Pure Python: the same on every node, whatever its versions.

The law of the project stands here. The order of the rows depends on the seed and the number of rows alone; a step is a fixed
slice of that order. Which rank computes which rows of the slice depends on shares or speeds, and on nothing that changes the sum.

    order of epoch e       permutation(seed, e, rows)
    step s (from 0)        epoch s // steps_per_epoch, slice number s % steps_per_epoch of `global_batch` rows
    rows -> ranks          assign(): longest first, to the rank that would finish soonest
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
    """What one forward pass of a rank may hold: rows x longest row in tokens, rows (None: any), and the longest row it takes at all."""

    pass_tokens: int
    pass_rows: int | None = None
    row_tokens: int | None = None

    def takes(self, length: int) -> bool:
        """Whether a row of this length can be computed here."""
        return self.row_tokens is None or length <= self.row_tokens

    def holds(self, rows: int, longest: int) -> bool:
        """Whether one pass may hold so many rows. A single row always passes: `takes` is what refuses it."""
        return rows == 1 or (rows * longest <= self.pass_tokens and (self.pass_rows is None or rows <= self.pass_rows))


def assign(
    lengths: Sequence[int], speeds: Sequence[Speed], limits: Sequence[Limits], rows_of: Sequence[int] | None = None
) -> list[list[int]]:
    """For each rank, the positions in `lengths` (tokens of each row of a global batch) that it computes, longest first.

    Rows go longest first to the rank that would finish soonest (the rule of list scheduling on uniform machines: Graham 1969,
    Gonzalez, Ibarra and Sahni 1977). What a row costs is what it adds: its tokens in a pass of its own, or padded to the longest
    row of the open pass. `rows_of` fixes the number of rows of every rank; without it only speed decides, and a rank that
    would get nothing takes the shortest row it can, or its speed could not be measured. Ties go to the earlier row and the
    lower rank, so every rank computes the same answer. A row that no rank takes goes to those that take the longest rows.
    """
    assert len(speeds) == len(limits) and (rows_of is None or sum(rows_of) == len(lengths))
    left = None if rows_of is None else list(rows_of)
    finish = [speed.step_s for speed in speeds]
    open_pass = [(0, 0)] * len(speeds)  # (rows, longest) of the pass that the next row may join
    rows: list[list[int]] = [[] for _ in speeds]
    for position in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
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
    if left is None and len(lengths) >= len(speeds):
        for idle in (rank for rank in range(len(speeds)) if not rows[rank]):
            givers = [
                rank
                for rank in range(len(speeds))
                if len(rows[rank]) > 1 and limits[idle].takes(lengths[rows[rank][-1]])
            ]
            if givers:
                giver = min(givers, key=lambda rank: (lengths[rows[rank][-1]], -finish[rank], rank))
                rows[idle].append(rows[giver].pop())
    return rows


def _roomiest(ranks: Sequence[int], limits: Sequence[Limits]) -> list[int]:
    most = max(limits[rank].row_tokens or 0 for rank in ranks)
    return [rank for rank in ranks if (limits[rank].row_tokens or 0) == most]


def _added_s(speed: Speed, limits: Limits, open_pass: tuple[int, int], length: int) -> tuple[float, tuple[int, int]]:
    """(seconds that a row adds, the open pass after it): in the open pass it is padded to its longest row, or it begins another."""
    rows, longest = open_pass
    alone = speed.micro_batch_s + speed.token_s * length
    joined = speed.token_s * longest
    if rows and joined <= alone and limits.holds(rows + 1, longest):
        return joined, (rows + 1, longest)
    return alone, (1, length)


def micro_batches(rows: Sequence[int], lengths: Sequence[int], speed: Speed, limits: Limits) -> list[list[int]]:
    """Cut one rank's rows into passes within `limits` at the least cost: padding against the fixed cost of one more pass.

    `lengths[i]` is the length of `rows[i]`. Longest together; exact by dynamic programming over the sorted rows (a pass is a
    run of them, because a shorter row in between pads no more). The first pass holds the longest row: a shortage of memory
    shows at once.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    best = [0.0]
    cut_at = [0]
    for end in range(1, len(order) + 1):
        choices = []
        for start in range(end - 1, -1, -1):
            longest = lengths[order[start]]
            if not limits.holds(end - start, longest):
                break
            choices.append((best[start] + speed.micro_batch_s + speed.token_s * longest * (end - start), start))
        seconds, start = min(choices)
        best.append(seconds)
        cut_at.append(start)
    passes: list[list[int]] = []
    end = len(order)
    while end:
        passes.insert(0, [rows[i] for i in order[cut_at[end] : end]])
        end = cut_at[end]
    return passes


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
