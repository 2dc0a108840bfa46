"""Which rows are trained in which step, and by which rank. Pure Python: the same on every node, whatever its versions.

The law of the project stands here. The order of the rows depends on the seed and the number of rows alone; a step is a fixed
slice of that order. Which rank computes which rows of the slice depends on the shares, and on nothing that changes the sum.

    order of epoch e       permutation(seed, e, rows)
    step s (from 0)        epoch s // steps_per_epoch, slice number s % steps_per_epoch of `global_batch` rows
    rows -> ranks          assign(): longest first, to the rank that would finish soonest
    rows -> micro-batches  micro_batches(): longest together
"""

from __future__ import annotations

import bisect
import functools
import math
import random
from collections.abc import Sequence


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


def assign(lengths: Sequence[int], shares: Sequence[int]) -> list[list[int]]:
    """For each rank, the positions in `lengths` (tokens of each row of a global batch) that it computes.

    Rows go longest first to the rank that would finish soonest, (load + length) / share, among those whose quota is not used up
    (the rule of list scheduling on uniform machines: Graham 1969, Gonzalez, Ibarra and Sahni 1977). Ties go to the earlier row
    and the lower rank, so every rank computes the same answer.
    """
    left = quotas(len(lengths), shares)
    loads = [0] * len(shares)
    rows: list[list[int]] = [[] for _ in shares]
    for position in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        length = lengths[position]
        open_ranks = (rank for rank in range(len(shares)) if left[rank])
        rank = min(open_ranks, key=lambda rank: ((loads[rank] + length) / shares[rank], rank))
        rows[rank].append(position)
        loads[rank] += length
        left[rank] -= 1
    return rows


def micro_batches(rows: Sequence[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    """Cut one rank's rows into lists of at most `most` rows, longest together, so that little is padded.

    `lengths[i]` is the length of `rows[i]`. The first micro-batch is the largest: a shortage of memory shows at once.
    """
    order = sorted(range(len(rows)), key=lambda i: (-lengths[i], i))
    return [[rows[i] for i in order[start : start + most]] for start in range(0, len(order), most)]


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
