"""A table of plain lines: as wide as its content, and when that is too wide, without its least important columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Column:
    """`importance` 0 is never left out; of the others the highest number goes first."""

    title: str
    align: Literal["left", "right"] = "left"
    importance: int = 0


def lay(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int, *, indent: int = 1) -> list[Text]:
    """A heading line and one line per row, each at most `width` cells. Columns that are empty in every row are left out.

    A row with one cell only is a remark that runs through all columns.
    """
    full = [row for row in rows if len(row) == len(columns)]
    kept = [number for number, column in enumerate(columns) if column.importance == 0 or any(row[number].plain for row in full)]
    widths = {number: max([cell_len(columns[number].title), *(cell_len(row[number].plain) for row in full)]) for number in kept}
    while indent + sum(widths[number] for number in kept) + _GAP * (len(kept) - 1) > width:
        optional = [number for number in kept if columns[number].importance]
        if not optional:
            break
        kept.remove(max(optional, key=lambda number: (columns[number].importance, number)))
    heading = [Text(columns[number].title, style="dim") for number in range(len(columns))]
    lines = [_line(heading, columns, kept, widths, indent)]
    for row in rows:
        if len(row) == len(columns):
            lines.append(_line(row, columns, kept, widths, indent))
        else:
            lines.append(Text(" " * indent).append_text(row[0]))
    return [clip(line, width) for line in lines]


def clip(line: Text, width: int) -> Text:
    """The line, cut to `width` cells with an ellipsis."""
    short = line.copy()
    short.truncate(max(1, width), overflow="ellipsis")
    return short


def ends(left: Text, right: Text, width: int) -> Text:
    """One line with something at both ends; the left part gives way."""
    room = width - cell_len(right.plain) - 1
    line = clip(left, room) if room > 0 else Text()
    line.append(" " * max(1, width - cell_len(line.plain) - cell_len(right.plain)))
    return clip(line.append_text(right), width)


def _line(cells: Sequence[Text], columns: Sequence[Column], kept: Sequence[int], widths: dict[int, int], indent: int) -> Text:
    line = Text(" " * indent)
    for place, number in enumerate(kept):
        fill = " " * (widths[number] - cell_len(cells[number].plain))
        if place:
            line.append(" " * _GAP)
        if columns[number].align == "right":
            line.append(fill)
        line.append_text(cells[number])
        if columns[number].align == "left":
            line.append(fill)
    line.rstrip()
    return line
