"""A table of plain lines: as wide as its content, and when that is too wide, without its least important columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len, chop_cells
from rich.text import Text

_GAP = 2


@dataclass(frozen=True)
class Column:
    """`importance` 0 is never left out; of the others the highest number goes first. `gap`: the empty cells behind it."""

    title: str
    align: Literal["left", "right"] = "left"
    importance: int = 0
    gap: int = _GAP


def lay(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int, *, indent: int = 1) -> list[Text]:
    """A heading line and one line per row, each at most `width` cells. Columns that are empty in every row are left out.

    A row with one cell only is a remark that runs through all columns.
    """
    full = [row for row in rows if len(row) == len(columns)]
    kept = [number for number, column in enumerate(columns) if column.importance == 0 or any(row[number].plain for row in full)]
    widths = {number: max([cell_len(columns[number].title), *(cell_len(row[number].plain) for row in full)]) for number in kept}
    while indent + sum(widths[number] + columns[number].gap for number in kept) - columns[kept[-1]].gap > width:
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


def wrap(line: Text, width: int, indent: int, most: int | None = None) -> list[Text]:
    """The line in lines of at most `width` cells, broken between words; the later ones begin `indent` cells in. Of `most` lines the last is cut."""
    indent = indent if width > 2 * indent else 0
    lines: list[Text] = []
    while cell_len(line.plain) > width and len(lines) + 1 != most:
        fits = len(chop_cells(line.plain, width)[0])
        space = line.plain.rfind(" ", indent + 1, fits + 1)
        cut = space if space > indent and line.plain[:space].strip() else max(1, fits)
        lines.append(line[:cut])
        line = Text(" " * indent).append_text(line[cut + (line.plain[cut] == " ") :])
    return [*lines, clip(line, width)]


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
            line.append(" " * columns[kept[place - 1]].gap)
        if columns[number].align == "right":
            line.append(fill)
        line.append_text(cells[number])
        if columns[number].align == "left":
            line.append(fill)
    line.rstrip()
    return line
