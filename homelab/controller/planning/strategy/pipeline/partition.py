"""In which order the ranks stand, and how many layers each holds: the slowest stage as fast as memory allows. Pure.

For every order of the ranks, the best cut is found exactly: the least time of the slowest stage over all ways to give the first stages so many
layers, one stage after the other. Of the best of these orders, the whole step is played through (`stage_time`), and the fastest is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_MOST_ORDERS = 720  # of six ranks; of more, orders by memory and by speed are tried
_PLAYED = 24


@dataclass(frozen=True)
class Cut:
    """The ranks in the order of their stages, and the layers of each."""

    order: tuple[int, ...]
    layers: tuple[int, ...]
    slowest_s: float


def cuts(ranks: int, layers: int, most_layers: Callable[[int, int], int], seconds: Callable[[int, int, int], float]) -> list[Cut]:
    """The best cut of each order of the ranks, the fastest first; empty where no cut has room.

    `most_layers(rank, stage)`: how many layers fit; `seconds(rank, stage, count)`: what so many of them take of a step.
    """
    room = {(rank, stage): most_layers(rank, stage) for rank in range(ranks) for stage in range(ranks)}
    results = []
    for order in _orders(ranks, room):
        layers_of = _best(order, layers, room, seconds)
        if layers_of is not None:
            slowest_s = max(seconds(rank, stage, count) for stage, (rank, count) in enumerate(zip(order, layers_of, strict=True)))
            results.append(Cut(order, layers_of, slowest_s))
    return sorted(results, key=lambda cut: (cut.slowest_s, cut.order))[:_PLAYED]


def _orders(ranks: int, room: dict[tuple[int, int], int]) -> Iterator[tuple[int, ...]]:
    if math.factorial(ranks) <= _MOST_ORDERS:
        yield from itertools.permutations(range(ranks))
        return
    middle = ranks // 2
    by_room = sorted(range(ranks), key=lambda rank: (room[rank, middle], rank))
    yield tuple(range(ranks))
    for order in (by_room, by_room[::-1]):
        for turn in range(ranks):
            yield tuple(order[turn:] + order[:turn])


def _best(
    order: Sequence[int], layers: int, room: dict[tuple[int, int], int], seconds: Callable[[int, int, int], float]
) -> tuple[int, ...] | None:
    """The layers of each stage with the least time of the slowest one; None where they do not fit."""
    # best[l]: (slowest, layers of each) over the stages so far, which hold l layers together
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage, rank in enumerate(order):
        left_after = len(order) - stage - 1
        own_s = [seconds(rank, stage, count) for count in range(min(room[rank, stage], layers) + 1)]
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for held, (slowest_s, chosen) in best.items():
            for count in range(1, min(room[rank, stage], layers - held - left_after) + 1):
                candidate = (max(slowest_s, own_s[count]), (*chosen, count))
                if held + count not in longer or candidate < longer[held + count]:
                    longer[held + count] = candidate
        best = longer
    return best[layers][1] if layers in best else None
