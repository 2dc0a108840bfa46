"""Attempts, faults and rebalances over the time of the day as inline SVG. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from homelab.controller.dashboard import words
from homelab.controller.features.report.number_text import moment
from homelab.controller.features.report.run_report import AttemptRow, Happening

WIDTH, ROW, LEFT, RIGHT = 640.0, 34.0, 76.0, 14.0
_MOST_ROWS = 24
_MOST_MARKS = 300


def attempt_chart(attempts: Sequence[AttemptRow], timeline: Sequence[Happening], now: float, utc_offset_s: int) -> str:
    """The <figure>, or nothing where no attempt has a time. Rows: the newest attempts; a triangle is a fault, a diamond a rebalance."""
    rows = [row for row in attempts if row.started_at is not None][-_MOST_ROWS:]
    if not rows:
        return ""
    begin = min(row.started_at for row in rows if row.started_at is not None)
    marks = [entry for entry in timeline if entry.sort in ("fault", "rebalance") and entry.time >= begin][:_MOST_MARKS]
    open_end = now if any(row.state in ("running", "starting", "stopping") for row in rows) else begin
    end = max([open_end, *(row.ended_at or row.started_at or begin for row in rows), *(mark.time for mark in marks)])
    end = end if end > begin else begin + 1.0
    height = ROW * (len(rows) + 1) + 30

    def x(time: float) -> float:
        return LEFT + (max(begin, min(end, time)) - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    parts = [
        '<figure class="chart wide"><figcaption>Attempts over time</figcaption>',
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="tt dt"><title id="tt">Attempts, faults and rebalances over time</title>',
        f'<desc id="dt">{len(rows)} attempts in {escape(words.duration(end - begin))}; the tables below list them.</desc>',
    ]
    for place, row in enumerate(rows):
        y, stop = 8 + place * ROW, row.ended_at if row.ended_at is not None else end
        left, right = x(row.started_at or begin), x(stop)
        kind = row.state if row.state in ("done", "failed", "lost", "stopped", "running") else "other"
        parts.append(f'<text class="tick" x="0" y="{y + 16:.1f}">attempt {row.number}</text>')
        parts.append(
            f'<rect class="bar b-{kind}" x="{left:.1f}" y="{y:.1f}" width="{max(3.0, right - left):.1f}" height="{ROW - 12:g}" rx="4"/>'
        )
        label = f"{row.state}, to step {row.last_step}" if row.last_step is not None else row.state
        if right - left > 7.0 * len(label):
            parts.append(f'<text class="inbar" x="{left + 8:.1f}" y="{y + 15:.1f}">{escape(label)}</text>')
    y = 8 + len(rows) * ROW + 11
    parts.append(
        f'<text class="tick" x="0" y="{y + 4:.1f}">events</text><line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
    )
    parts += [_mark(mark, x(mark.time), y, moment(mark.time, utc_offset_s)) for mark in marks]
    bottom = height - 6
    parts.append(f'<text class="tick" x="{LEFT:g}" y="{bottom:g}">{escape(moment(begin, utc_offset_s))}</text>')
    parts.append(
        f'<text class="tick" text-anchor="end" x="{WIDTH - RIGHT:g}" y="{bottom:g}">+ {escape(words.duration(end - begin))}</text></svg>'
    )
    parts.append(
        '<ul class="legend"><li><svg class="key" viewBox="0 0 16 16" aria-hidden="true"><path class="m-fault" d="M8 1L15 15H1Z"/></svg>fault</li>'
    )
    parts.append(
        '<li><svg class="key" viewBox="0 0 16 16" aria-hidden="true"><path class="m-rebalance" d="M8 1L15 8L8 15L1 8Z"/></svg>rebalance</li></ul></figure>'
    )
    return "".join(parts)


def _mark(mark: Happening, x: float, y: float, time: str) -> str:
    """A triangle or a diamond: the shape tells what the colour does."""
    shape = (
        f"M{x:.1f} {y - 8:.1f}L{x + 7:.1f} {y + 6:.1f}H{x - 7:.1f}Z" if mark.sort == "fault" else f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7Z"
    )
    return f'<path class="m-{mark.sort}" d="{shape}"><title>{escape(time)} {escape(mark.text)}</title></path>'
