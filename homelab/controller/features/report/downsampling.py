"""Fewer points for a picture: the smallest and the largest value of each column of pixels, so that a spike of one step stays. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from homelab.controller.features.report.run_report import CurvePoint

COLUMNS = 320
"""Columns of the picture; a series has at most two points of each, and its two ends."""


def thinned(points: Sequence[CurvePoint], columns: int = COLUMNS) -> tuple[CurvePoint, ...]:
    """At most 2 x `columns` + 2 of the points, in their order. All of them where there are no more than that.

    A mean of each column would hide a single bad step, and every tenth step would miss it; the two extremes of a column draw the same
    vertical stroke as all its points do.
    """
    if len(points) <= 2 * columns:
        return tuple(points)
    first, last = points[0].step, points[-1].step
    extremes: dict[int, tuple[CurvePoint, CurvePoint]] = {}
    for point in points:
        column = min(columns - 1, (point.step - first) * columns // max(1, last - first))
        low, high = extremes.get(column, (point, point))
        extremes[column] = (point if point.value < low.value else low, point if point.value > high.value else high)
    kept = {point.step: point for pair in extremes.values() for point in pair}
    kept |= {points[0].step: points[0], points[-1].step: points[-1]}
    return tuple(kept[step] for step in sorted(kept))


def rows_of(steps: Sequence[int], most: int, always: Sequence[int] = ()) -> list[int]:
    """At most `most` of the sorted steps, evenly, with the first and the last; of `always` as many as there is room for."""
    if len(steps) <= most:
        return list(steps)
    wanted = sorted(set(always))[-most // 2 :] if always else []
    room = max(2, most - len(wanted))
    even = {steps[round(place * (len(steps) - 1) / (room - 1))] for place in range(room)}
    return sorted(even.union(wanted))


def scale(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers that cover low..high, at most `most` + 2 of them: 1, 2 or 5 times a power of ten apart."""
    if not math.isfinite(low) or not math.isfinite(high):
        return [0.0, 1.0]
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    begin, end = math.floor(low / apart + 1e-9), math.ceil(high / apart - 1e-9)
    return [number * apart for number in range(begin, end + 1)]
