"""A set of steps, kept as spans: a run makes its steps one after the other. Pure."""

from __future__ import annotations

from bisect import bisect_right


class StepSet:
    """Whole numbers, in as much room as there are gaps between them."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, step: int) -> bool:
        place = bisect_right(self._firsts, step) - 1
        return place >= 0 and step <= self._lasts[place]

    def add(self, step: int) -> bool:
        """Whether it was not in it before."""
        firsts, lasts = self._firsts, self._lasts
        place = bisect_right(firsts, step) - 1
        if place >= 0 and step <= lasts[place]:
            return False
        follows, leads = place >= 0 and lasts[place] == step - 1, place + 1 < len(firsts) and firsts[place + 1] == step + 1
        if follows and leads:
            lasts[place] = lasts.pop(place + 1)
            del firsts[place + 1]
        elif follows:
            lasts[place] = step
        elif leads:
            firsts[place + 1] = step
        else:
            firsts.insert(place + 1, step)
            lasts.insert(place + 1, step)
        return True

    def covers(self, first: int, last: int) -> bool:
        """Whether every step from `first` to `last` is in it."""
        place = bisect_right(self._firsts, first) - 1
        return first > last or (place >= 0 and last <= self._lasts[place])

    def meets(self, other: StepSet) -> bool:
        """Whether a step is in both."""
        return any(
            first in other or ((place := bisect_right(other._firsts, first)) < len(other._firsts) and other._firsts[place] <= last)
            for first, last in zip(self._firsts, self._lasts, strict=True)
        )
