"""A curve as inline SVG: two axes with units, at most four lines that differ in colour and in dashes, a title for screen readers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from homelab.controller.features.report.downsampling import scale
from homelab.controller.features.report.number_text import figure, tick
from homelab.controller.features.report.run_report import Curve, CurvePoint, Series

WIDTH, HEIGHT = 640.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 14.0, 12.0, 40.0
KINDS = 6
"""Colours of page_style; a further line takes the first again."""
_MOST_DOTS = 60


def chart(curve: Curve, number: int) -> str:
    """The <figure> of a curve; `number` makes its ids unique on the page."""
    if not curve.series:
        return f'<figure class="chart"><figcaption>{escape(curve.name)}</figcaption><p class="note">{escape(curve.note)}</p></figure>'
    points = [point for series in curve.series for point in series.points]
    down, across = scale(min(point.value for point in points), max(point.value for point in points)), _steps(points)
    frame = _Frame(across[0], across[-1], down[0], down[-1])
    entries = "".join(
        f'<li><svg class="key" viewBox="0 0 26 8" aria-hidden="true"><line class="line s{place % KINDS}" x1="0" x2="26" y1="4" y2="4"/></svg>{escape(one.label)}</li>'
        for place, one in enumerate(curve.series)
    )
    parts = [
        f'<figure class="chart"><figcaption>{escape(curve.name)} <span class="unit">{escape(curve.unit)}</span></figcaption>',
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="t{number} d{number}" data-chart="{number}">',
        f'<title id="t{number}">{escape(curve.name)} over the {escape(curve.over or "steps")}</title><desc id="d{number}">{escape(described(curve))}</desc>',
        *_axes(frame, across, down, curve),
        *(_line(series, place, frame) for place, series in enumerate(curve.series)),
        '<line class="cursor" x1="-9" x2="-9" y1="0" y2="0"/></svg>',
        f'<ul class="legend">{entries}</ul>', f'<p class="value" data-value="{number}"></p>',
    ]  # fmt: skip
    if curve.note:
        parts.append(f'<p class="note">{escape(curve.note)}</p>')
    return "".join([*parts, "</figure>"])


def described(curve: Curve) -> str:
    """What the picture shows, in words."""
    lines, word = [], curve.over or "step"
    for series in curve.series:
        values = [point.value for point in series.points]
        lines.append(
            f"{series.label}: {figure(values[0])} in {word} {series.points[0].step}, {figure(values[-1])} in {word} {series.points[-1].step}, "
            f"least {figure(min(values))}, most {figure(max(values))}"
        )
    return f"In {curve.unit}. " + "; ".join(lines) + "."


class _Frame:
    """From steps and values to the units of the viewBox."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self._left, self._low = left, low
        self._per_step = (WIDTH - LEFT - RIGHT) / ((right - left) or 1.0)
        self._per_value = (HEIGHT - TOP - BOTTOM) / ((high - low) or 1.0)

    def x(self, step: float) -> float:
        return LEFT + (step - self._left) * self._per_step

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._low) * self._per_value


def _steps(points: Sequence[CurvePoint]) -> list[float]:
    """The numbers of the lower axis: whole steps, from the first to the last; round ones between them."""
    first, last = min(point.step for point in points), max(point.step for point in points)
    if first == last:
        return [float(first - 1), float(first), float(first + 1)]
    apart = (last - first) / 20
    return [
        float(first),
        *(step for step in scale(first, last, 6) if first + apart < step < last - apart and step == int(step)),
        float(last),
    ]


def _axes(frame: _Frame, across: Sequence[float], down: Sequence[float], curve: Curve) -> list[str]:
    parts, apart = [], down[1] - down[0]
    for value in down:
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 7:g}" y="{y + 4:.1f}">{escape(tick(value, apart))}</text>')
    for place, step in enumerate(across):
        x, anchor = frame.x(step), "end" if place == len(across) - 1 else "middle"
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM:g}" y2="{HEIGHT - BOTTOM + 4:g}"/>')
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18:g}">{escape(tick(step, 1.0))}</text>')
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{HEIGHT - BOTTOM:g}" y2="{HEIGHT - BOTTOM:g}"/>')
    parts.append(
        f'<text class="name" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2:g}" y="{HEIGHT - 5:g}">{escape(curve.over or "optimizer step")}</text>'
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(f'<text class="name" text-anchor="middle" transform="translate(11 {middle:g}) rotate(-90)">{escape(curve.unit)}</text>')
    return parts


def _line(series: Series, place: int, frame: _Frame) -> str:
    """A line; few points are dots, too, so that one alone is seen."""
    kind = f"s{place % KINDS}"
    places = [(frame.x(point.step), frame.y(point.value)) for point in series.points]
    dots = "".join(f'<circle class="dot {kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in places) if len(places) <= _MOST_DOTS else ""
    return f'<polyline class="line {kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>{dots}'
