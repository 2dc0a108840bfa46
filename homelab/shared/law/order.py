"""Which rows are trained in which step: the order of a training, which knows nothing of ranks.

order of epoch e       permutation(seed, e, rows)
step s (from 0)        epoch s // steps_per_epoch, slice number s % steps_per_epoch of `global_batch` rows
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence


@functools.lru_cache(maxsize=2)
def permutation(seed: int, epoch: int, count: int) -> tuple[int, ...]:
    """A shuffled order of range(count) for this epoch (0-based).

    Fisher and Yates (Durstenfeld 1964) on `random.random()`. Nodes may run different Pythons, and Python keeps that stream the same in
    all versions; it makes no such promise for `random.shuffle`.
    """
    stream = random.Random(f"homelab order {seed} {epoch}").random
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(stream() * (last + 1))
        order[last], order[other] = order[other], order[last]
    return tuple(order)


def steps_per_epoch(count: int, global_batch: int) -> int:
    """Optimizer steps of one epoch of `count` rows. The last step may be smaller, because no row is dropped."""
    return math.ceil(count / global_batch)


def step_rows(step: int, *, seed: int, count: int, global_batch: int) -> tuple[int, tuple[int, ...]]:
    """(epoch, rows) of optimizer step `step` (0-based), by index arithmetic."""
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
