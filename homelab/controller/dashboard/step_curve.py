"""One figure over the steps of a run: all of them in little room, and few points that draw the same curve. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator

from homelab.controller.dashboard.snapshot import LossPoint

MOST_COLUMNS = 1024
"""A curve has at most two points of each column, and its two ends."""


class _Column:
    """The steps that lie side by side, in their order: which attempt measured each, when, and what."""

    def __init__(self) -> None:
        self.steps, self.attempts = array("q"), array("q")
        self.times, self.values = array("d"), array("d")
        self.points: tuple[LossPoint, ...] | None = None

    def put(self, step: int, value: float, attempt: int, time: float) -> None:
        place = bisect_left(self.steps, step)
        if place < len(self.steps) and self.steps[place] == step:
            if (attempt, time) >= (self.attempts[place], self.times[place]):
                self.attempts[place], self.times[place], self.values[place] = attempt, time, value
                self.points = None
            return
        for figures, figure in ((self.steps, step), (self.attempts, attempt), (self.times, time), (self.values, value)):
            figures.insert(place, figure)  # type: ignore[arg-type]
        self.points = None

    def point(self, place: int) -> LossPoint:
        return LossPoint(step=self.steps[place], loss=self.values[place])

    def extremes(self) -> tuple[LossPoint, ...]:
        """The smallest and the largest value, in the order of their steps; what is not a number only where nothing else is."""
        if self.points is None:
            finite = [place for place, value in enumerate(self.values) if math.isfinite(value)] or [0]
            ends = {min(finite, key=self.values.__getitem__), max(finite, key=self.values.__getitem__)}
            self.points = tuple(self.point(place) for place in sorted(ends))
        return self.points


class StepCurve:
    """Of every step the value that the newest attempt has measured, of that the latest.

    A column is 1, 2, 4 ... steps wide, the least with which MOST_COLUMNS are enough: the points do not depend on the order of the values.
    """

    def __init__(self) -> None:
        self._columns: dict[int, _Column] = {}
        self._doublings = 0

    def put(self, step: int, value: float, attempt: int, time: float) -> None:
        """One value. `time` in seconds since 1970."""
        self._column(step).put(step, value, attempt, time)
        while len(self._columns) > MOST_COLUMNS:
            self._spread(self._doublings + 1, list(self._all()))

    def cut(self, first: int, attempt: int) -> None:
        """Forget what attempts before `attempt` have measured from step `first` on."""
        touched = [column for number, column in self._columns.items() if number >= first >> self._doublings]
        if any(step >= first and by < attempt for column in touched for step, by in zip(column.steps, column.attempts, strict=True)):
            kept = [entry for entry in self._all() if entry[0] < first or entry[2] >= attempt]
            self._spread(0, kept)
            while len(self._columns) > MOST_COLUMNS:
                self._spread(self._doublings + 1, kept)

    @property
    def count(self) -> int:
        """How many steps have a value."""
        return sum(len(column.steps) for column in self._columns.values())

    @property
    def first(self) -> LossPoint | None:
        """That of the first step; None where there is none."""
        return self._columns[min(self._columns)].point(0) if self._columns else None

    @property
    def last(self) -> LossPoint | None:
        """That of the last step; None where there is none."""
        return self._columns[max(self._columns)].point(-1) if self._columns else None

    @property
    def points(self) -> tuple[LossPoint, ...]:
        """By step: all where they are few, else the extremes of each column and the two ends."""
        inner = [point for number in sorted(self._columns) for point in self._columns[number].extremes()]
        first, last = self.first, self.last
        if first is None or last is None:
            return ()
        return (*([first] if first.step < inner[0].step else []), *inner, *([last] if last.step > inner[-1].step else []))

    def _column(self, step: int) -> _Column:
        number = step >> self._doublings
        if number not in self._columns:
            self._columns[number] = _Column()
        return self._columns[number]

    def _all(self) -> Iterator[tuple[int, float, int, float]]:
        for column in self._columns.values():
            yield from zip(column.steps, column.values, column.attempts, column.times, strict=True)

    def _spread(self, doublings: int, entries: list[tuple[int, float, int, float]]) -> None:
        self._columns, self._doublings = {}, doublings
        for entry in sorted(entries):
            self._column(entry[0]).put(*entry)
