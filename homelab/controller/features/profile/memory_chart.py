"""The memory of one rank over its profiled steps, as text, with the plan's peak as a line. Pure."""

from __future__ import annotations

from rich.text import Text

from homelab.controller.base.units import gibibytes
from homelab.controller.features.profile.rank_profile import RankProfile

HEIGHT, LEAST_WIDTH = 10, 50
_LABEL = 9  # cells before the axis
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PLANNED = "─"


def lines(profile: RankProfile, predicted_bytes: int | None, width: int) -> list[Text]:
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
