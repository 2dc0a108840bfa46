"""A profile for people: its tables, and the memory of one rank as a chart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from homelab.controller.base.units import gibibytes
from homelab.controller.features.profile.over_ranks import DearOperator, ExchangeOverRanks, MemoryRow
from homelab.controller.features.profile.rank_profile import RankProfile

HEIGHT, LEAST_WIDTH = 10, 50
_LABEL = 9  # cells before the axis
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLANNED = "─"
MOST_EXCHANGES = 16


def operators(rows: Sequence[DearOperator]) -> Table:
    """The dearest operators."""
    drawn = _table("operator", "calls", "seconds", "of the steps", left=("mostly called by", "of it"))
    for row in rows:
        share = "" if row.place_share is None else f"{row.place_share:.0%}"
        drawn.add_row(Text(row.name), str(row.calls), f"{row.seconds:.3f}", f"{row.share:.1%}", Text(row.place), share)
    return drawn


def phases(ranks: Sequence[RankProfile]) -> Table:
    """Where the time of a step goes on each rank, in seconds."""
    names = [name for name in ranks[0].phases if any(one.phases.get(name, 0.0) > 0 for one in ranks)]
    drawn = _table("rank", *names, "step", "usual step")
    for one in ranks:
        own = [f"{one.phases.get(name, 0.0) / len(one.steps):.3f}" for name in names]
        usual = "" if one.usual_step_s is None else f"{one.usual_step_s:.3f}"
        drawn.add_row(Text(f"{one.rank} ({one.node})"), *own, f"{sum(one.step_s) / len(one.step_s):.3f}", usual)
    return drawn


def exchanges(rows: Sequence[ExchangeOverRanks]) -> Table:
    """The dearest exchanges in the order in which they happen, and the sum of all. Per rank and step."""
    shown = set(sorted(range(len(rows)), key=lambda number: -rows[number].sent_bytes)[:MOST_EXCHANGES])
    rest = [row for number, row in enumerate(rows) if number not in shown]
    drawn = _table("exchange", "kind", "calls", "MB sent", "seconds", "while computing")
    for number, row in enumerate(rows):
        if number in shown:
            overlap = "" if row.overlap is None else f"{row.overlap:.0%}"
            drawn.add_row(Text(row.name), Text(row.kind), f"{row.calls:.0f}", f"{row.sent_bytes / 1e6:.3f}", f"{row.seconds:.3f}", overlap)
    if rest:
        drawn.add_row(
            f"{len(rest)} more",
            "",
            f"{sum(row.calls for row in rest):.0f}",
            f"{_megabytes(rest):.3f}",
            f"{sum(row.seconds for row in rest):.3f}",
            "",
        )
    drawn.add_row("all", "", f"{sum(row.calls for row in rows):.0f}", f"{_megabytes(rows):.3f}", "", "", style="bold")
    return drawn


def memory(rows: Sequence[MemoryRow]) -> Table:
    """The peak of each rank beside the plan's."""
    drawn = _table("rank", "most held", "planned", "plan over held", left=("at",))
    for row in rows:
        peak = "" if row.peak_bytes is None else f"{gibibytes(row.peak_bytes):.2f} GiB"
        planned = "" if row.predicted_bytes is None else f"{gibibytes(row.predicted_bytes):.2f} GiB"
        drawn.add_row(Text(f"{row.rank} ({row.node})"), peak, planned, "" if row.error is None else f"{row.error:+.0%}", row.peak_phase)
    return drawn


def _megabytes(rows: Sequence[ExchangeOverRanks]) -> float:
    return sum(row.sent_bytes for row in rows) / 1e6


def _table(first: str, *figures: str, left: Sequence[str] = ()) -> Table:
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column(first, overflow="fold")
    for name in figures:
        drawn.add_column(name, justify="right")
    for name in left:
        drawn.add_column(name, overflow="fold")
    return drawn


def memory_chart(profile: RankProfile, predicted_bytes: int | None, width: int) -> list[Text]:
    """A title, the chart from nothing to the highest of both, and its seconds; [] where nothing was measured. `width` in cells."""
    points = profile.memory.points
    if not points or width < LEAST_WIDTH:
        return []
    columns = width - _LABEL - 1
    top = 1.05 * max([size for _, size in points] + [predicted_bytes or 0])
    last_s = points[-1][0] or 1.0
    held = _by_column(points, columns, last_s)
    line_row = None if predicted_bytes is None else min(HEIGHT - 1, int(predicted_bytes / top * HEIGHT))
    content = [
        Text(f"memory of rank {profile.rank} ({profile.node})", style="dim").append(
            f", {_PLANNED * 2} the plan's peak" if predicted_bytes else ""
        )
    ]
    for row in reversed(range(HEIGHT)):
        label = f"{gibibytes(top * (row + 1) / HEIGHT):.2f} GiB" if row in (HEIGHT - 1, HEIGHT // 2) else ""
        body = Text()
        for size in held:
            eighths = max(0, min(8, round((size / top * HEIGHT - row) * 8)))
            is_planned = row == line_row and not eighths
            body.append(_PLANNED if is_planned else _EIGHTHS[eighths], style="yellow" if is_planned else "")
        content.append(Text(f"{label:>{_LABEL}}", style="dim").append("┤" if label else "│").append_text(body))
    begin, end = "0 s", f"{last_s:.2f} s"
    content.append(Text(" " * (_LABEL + 1) + begin + " " * max(1, columns - len(begin) - len(end)) + end, style="dim"))
    return content


def _by_column(points: tuple[tuple[float, int], ...], columns: int, last_s: float) -> list[int]:
    """The most that is held within each column; where nothing changes, what was held before."""
    highest: dict[int, int] = {}
    last: dict[int, int] = {}
    for at_s, size in points:
        column = min(columns - 1, max(0, int(at_s / last_s * columns)))
        highest[column] = max(highest.get(column, 0), size)
        last[column] = size
    held, now = [], points[0][1]
    for column in range(columns):
        held.append(highest.get(column, now))
        now = last.get(column, now)
    return held
