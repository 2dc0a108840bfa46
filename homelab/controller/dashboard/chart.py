"""The loss as a curve with axes, for terminals that have the room. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from homelab.controller.dashboard import words
from homelab.controller.dashboard.columns import clip
from homelab.controller.dashboard.snapshot import LossPoint

LEAST_LINES, LEAST_WIDTH = 8, 60
_LABEL = 9  # cells before the axis
# Bits of U+2800: two columns of four dots, from the top.
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_EVALUATED = "◆"


def _label(loss: float) -> str:
    return words.loss(loss) if abs(loss) < 1000 else f"{loss:.1e}"


def lines(losses: Sequence[LossPoint], evaluated: Sequence[LossPoint], width: int, height: int) -> list[Text]:
    """At most `height` lines: a title, the curve over the steps, their numbers. None where two steps are not known, or the room is too small."""
    finite = [point for point in losses if math.isfinite(point.loss)]
    judged = [point for point in evaluated if math.isfinite(point.loss)]
    if len({point.step for point in finite}) < 2 or width < LEAST_WIDTH or height < LEAST_LINES:
        return []
    rows, columns = height - 2, width - _LABEL - 2
    first, last = finite[0].step, finite[-1].step
    judged = [point for point in judged if first <= point.step <= last]
    values = [point.loss for point in (*finite, *judged)]
    low, span = min(values), (max(values) - min(values)) or 1.0
    if not math.isfinite(span):
        return []

    def across(step: int) -> int:
        return round((step - first) / (last - first) * (2 * columns - 1))

    def down(loss: float) -> int:
        return round((low + span - loss) / span * (4 * rows - 1))

    by_dot: dict[int, list[float]] = {}
    for point in finite:
        by_dot.setdefault(across(point.step), []).append(point.loss)
    cells = [[0] * columns for _ in range(rows)]
    for x, dot_values in by_dot.items():
        y = down(words.mean(dot_values))
        cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
    picture = [[chr(0x2800 + bits) if bits else " " for bits in row] for row in cells]
    for point in judged:
        picture[down(point.loss) // 4][across(point.step) // 2] = _EVALUATED
    labels = {0: low + span, rows // 2: low + span * (1 - (rows // 2) / max(1, rows - 1)), rows - 1: low}
    title = Text(" loss by step", style="dim").append(f"   {_EVALUATED} held-out rows" if judged else "")
    content = [title]
    for number, row in enumerate(picture):
        label = _label(labels[number]) if number in labels else ""
        content.append(
            Text(f"{label:>{_LABEL - 1}} ", style="dim").append("┤" if label else "│").append("".join(row).rstrip(), style="none")
        )
    begin, end = f"step {first}", f"step {last}"
    content.append(Text(" " * (_LABEL + 1) + begin + " " * max(1, columns - len(begin) - len(end)) + end, style="dim"))
    return [clip(line, width) for line in content]
