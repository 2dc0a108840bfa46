"""Which value most nodes share: the others are the ones that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

Value = TypeVar("Value", bound=Hashable)


def majority(values: Mapping[str, Value], first: str = "") -> Value:
    """The most frequent of the nodes' values. Of equally frequent ones: that of node `first`, or else the one that comes first."""
    counts = Counter(values.values())
    best = max(counts.values())
    if first in values and counts[values[first]] == best:
        return values[first]
    return next(value for value in values.values() if counts[value] == best)
