"""Layers that have no room on a card and come to it one after the other: which ones, in which order, into which place. Pure.

Where a frozen layer lies changes no number. The passes go layer by layer through all micro-batches of a group, forward, and then backward, so that
a load serves the whole group twice where it lies at the turn, and once in each direction elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# Where frozen layers lie, the best place first: memory of the host, pinned beside a card; memory that is not pinned, from which copies are slower; a file of its disk.
MEMORY: Final = "memory"
PAGEABLE: Final = "pageable"
DISK: Final = "disk"
PLACES_AT_ONCE = 2  # on the device: one that computes, one that comes
WORDS = {MEMORY: "memory", PAGEABLE: "memory, which is not pinned", DISK: "disk"}


@dataclass(frozen=True)
class Streaming:
    """How many of a rank's layers come from its host (`WORDS`), how many micro-batches go through a layer while it is there, and how many
    layers have a place at once."""

    layers: int
    group: int
    host: str
    places: int = PLACES_AT_ONCE


def streamed(begin: int, end: int, count: int) -> tuple[int, ...]:
    """Which `count` of the layers `begin` to `end` (not included) come from the host: evenly spread, so that resident layers compute while one comes."""
    layers = end - begin
    assert 0 <= count <= layers, (begin, end, count)
    return tuple(begin + place for place in range(layers) if (place + 1) * count // layers > place * count // layers)


class PlaceBook:
    """Which layer lies in which place. A layer that is needed takes the place of the one that is needed last (Belady, 1966)."""

    def __init__(self, places: int) -> None:
        assert places >= 1, places
        self.held: list[int | None] = [None] * places
        self.loads = 0

    def place_of(self, layer: int) -> int | None:
        """Where it lies; None: in the host's memory alone."""
        return self.held.index(layer) if layer in self.held else None

    def taken_for(self, layer: int, upcoming: Sequence[int]) -> int:
        """The place that this layer takes now; `upcoming` computes after it. Counts as a load."""
        place = max(range(len(self.held)), key=lambda one: (_next_use(self.held[one], upcoming), -one))
        self.held[place] = layer
        self.loads += 1
        return place

    def next_load(self, current: int, upcoming: Sequence[int]) -> tuple[int, int] | None:
        """The layer that can come while `current` computes, and its place; None where each place is needed before it. Counts as a load."""
        wanted = next((layer for layer in upcoming if layer not in self.held), None)
        if wanted is None:
            return None
        at = _next_use(wanted, upcoming)
        free = [place for place, held in enumerate(self.held) if held != current and _next_use(held, upcoming) > at]
        if not free:
            return None
        place = max(free, key=lambda one: (_next_use(self.held[one], upcoming), -one))
        self.held[place] = wanted
        self.loads += 1
        return wanted, place


def _next_use(layer: int | None, upcoming: Sequence[int]) -> int:
    """How many computations away this layer is; beyond all of them where it is not among them."""
    return upcoming.index(layer) if layer is not None and layer in upcoming else len(upcoming) + (layer is None)
