"""The two tables of the dashboard: nodes with their cards, and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from homelab.controller.base import units
from homelab.controller.dashboard import words
from homelab.controller.dashboard.answer import is_silent
from homelab.controller.dashboard.columns import Column, lay, wrap
from homelab.controller.dashboard.screen import Section
from homelab.controller.dashboard.snapshot import Course, LeftOut, NodeRow, RankRow
from homelab.shared.protocol.phases import BEFORE_TRAINING, TRAINING

_CONTINUED = "   "  # how the second line of a row begins
_HOT_C = 87.0  # where consumer cards begin to slow down


def nodes(rows: Sequence[NodeRow], width: int, importance: int, left_out: Sequence[LeftOut] = ()) -> Section:
    """One line per card; a node that cannot be asked, or that takes no part, has one with the reason."""
    cells: list[tuple[bool, list[Text]]] = []
    for row in rows:
        if row.reachable:
            cells += [(row.needs_action, _node_cells(row, number)) for number in range(max(1, len(row.gpus)))]
        else:
            cells += [(row.needs_action, [line]) for line in _not_asked(row, width)]
    cells += [(False, [line]) for node in left_out for line in _left_out(node, width)]
    return _table(_NODE_COLUMNS, cells, width, "nodes", importance)


def ranks(rows: Sequence[RankRow], width: int, importance: int, chosen: int | None = None) -> Section:
    """One line per worker process; that of the `chosen` rank stands out, and is kept where there is no room for all."""
    cells = [(is_silent(row) or row.rank == chosen, _rank_cells(row, is_chosen=row.rank == chosen)) for row in rows]
    return _table(_RANK_COLUMNS, cells, width, "ranks", importance)


def _not_asked(row: NodeRow, width: int) -> list[Text]:
    """Why it was not asked, in at most three lines."""
    style, begins = ("bold red", "unreachable: ") if row.needs_action else ("dim", "")
    return wrap(Text.assemble(f"{row.name}  ", (f"{begins}{row.why_not}", style)), width - 1, len(_CONTINUED), 3)


def _left_out(node: LeftOut, width: int) -> list[Text]:
    """Why it takes no part, in at most two lines."""
    because = f": {' '.join(node.because.split())}" if node.because else ""
    return wrap(Text.assemble((f"{node.name}  ", "dim"), ("left out", "yellow"), (because, "dim")), width - 1, len(_CONTINUED), 2)


_NODE_COLUMNS = (
    Column("node"),
    Column("torchrun"),
    Column("address", importance=6),
    # Of the whole machine, whatever else runs there.
    Column("", importance=7, gap=1),
    Column("host cpu", "right", importance=4),
    Column("", importance=7, gap=1),
    Column("host memory", "right", importance=5),
    Column("gpu", importance=3),
    Column("", importance=3, gap=1),
    Column("busy", "right", importance=1),
    Column("", importance=8),
    Column("", importance=3, gap=1),
    Column("vram", "right", importance=1),
    Column("peak", "right", importance=5),
    Column("free", "right", importance=5),
    Column("", importance=10),
    Column("temp", "right", importance=2),
    Column("", importance=11),
    Column("power", "right", importance=4),
    Column("", importance=9),
    Column("network in + out", "right", importance=4),
    Column("", importance=12),
)
_COURSE_CELLS = 10
_BLOCKS = 6  # of the bar beside a figure


def _node_cells(row: NodeRow, number: int) -> list[Text]:
    """The line of a node's card `number`; a node without cards has one line."""
    gpu = row.gpus[number] if row.gpus else None
    own = [
        Text(row.name),
        Text(row.torchrun, style="bold red" if row.needs_action else "yellow" if row.torchrun == "not started" else ""),
        Text(row.address, style="dim"),
        _blocks(row.cpu_load_percent, 100.0),
        Text(words.percent(row.cpu_load_percent)),
        _blocks(row.memory_used_bytes, row.memory_total_bytes),
        Text(words.used_of(row.memory_used_bytes, row.memory_total_bytes)),
    ]
    if number:
        own = [Text() for _ in own]
    network = [Text() if number else Text(_network(row)), Text() if number else _course(row.network)]
    if gpu is None:
        return [*own, Text("–", style="dim"), *(Text() for _ in _NODE_COLUMNS[len(own) + 1 : -len(network)]), *network]
    is_hot = gpu.temperature_c is not None and gpu.temperature_c >= _HOT_C
    temperature = words.NOTHING if gpu.temperature_c is None else f"{'! ' if is_hot else ''}{gpu.temperature_c:.0f} °C"
    return [
        *own,
        Text(_short(gpu.name)).append(" left out" if gpu.is_left_out else "", style="dim"),
        _blocks(gpu.utilisation_percent, 100.0),
        Text(words.percent(gpu.utilisation_percent)),
        _course(gpu.busy, 0.0, 100.0),
        _blocks(gpu.memory_used_bytes, gpu.memory_total_bytes),
        Text(words.used_of(gpu.memory_used_bytes, gpu.memory_total_bytes)),
        Text(_gb(gpu.memory_peak_bytes)),
        Text(_gb(gpu.memory_free_bytes)),
        _course(gpu.memory, 0.0, gpu.memory_total_bytes),
        Text(temperature, style="yellow" if is_hot else ""),
        _course(gpu.temperature),
        Text(words.watts(gpu.power_w, gpu.power_limit_w)),
        _course(gpu.power, 0.0, gpu.power_limit_w),
        *network,
    ]


def _short(card: str) -> str:
    return card.removeprefix("NVIDIA ").removeprefix("GeForce ").removesuffix(" GPU")


def _blocks(used: float | None, total: float | None) -> Text:
    """A bar of blocks, empty where one of both is not known."""
    filled, rest = words.blocks(None if used is None or not total else used / total, _BLOCKS)
    return Text(filled).append(rest, style="dim")


def _gb(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{units.memory_gb(size_bytes)} GB"


def _network(row: NodeRow) -> str:
    """'12.3 + 11.9 MB/s': what comes in and what goes out."""
    if row.received_bytes_per_s is None or row.sent_bytes_per_s is None:
        return ""
    return f"{units.megabytes(row.received_bytes_per_s)} + {units.megabytes(row.sent_bytes_per_s)} MB/s"


def _course(course: Course, low: float | None = None, high: float | None = None) -> Text:
    """The last looks as a small picture; nothing while there are not two. `low` and `high` are the ends of its scale, where it has fixed ones."""
    values = [math.nan if value is None else value for value in course.values[-_COURSE_CELLS:]]
    told = [value for value in values if math.isfinite(value)]
    return Text(words.sparkline(values, _COURSE_CELLS, low, high) if len(told) > 1 else "", style="dim")


_RANK_COLUMNS = (
    Column("rank", "right"),
    Column("node"),
    Column("device", importance=6),
    Column("share", "right", importance=2),
    Column("doing", importance=3),
    Column("step", "right"),
    Column("loss", "right", importance=5),
    Column("tokens/s", "right", importance=1),
    Column("━compute┄wire·wait", importance=1),
    Column("seconds", "right", importance=4),
    Column("peak memory", "right", importance=7),
    Column("heard", "right", importance=2),
)
_BAR_CELLS = 16


def _rank_cells(row: RankRow, *, is_chosen: bool) -> list[Text]:
    bar = words.bar(
        (row.compute_s, row.communication_s, 0.0) if row.wire_s is None else (row.compute_s, row.wire_s, row.wait_s), _BAR_CELLS
    )
    parts = [row.compute_s, row.communication_s] if row.wire_s is None else [row.compute_s, row.wire_s, row.wait_s]
    both = " + ".join(map(words.seconds, parts)) if any(bar) else ""
    age = words.duration(row.heartbeat_age_s)
    heartbeat = "" if row.heartbeat_age_s is None else f"silent {age}" if is_silent(row) else f"{age} ago"
    return [
        Text(f"> {row.rank}" if is_chosen else str(row.rank), style="bold" if is_chosen else ""),
        Text(row.node),
        Text(_short(row.device), style="dim"),
        Text(words.NOTHING if row.share is None else str(row.share)),
        Text(row.phase, style="dim" if row.phase == TRAINING else "yellow" if row.phase.partition(" ")[0] in BEFORE_TRAINING else ""),
        Text(words.NOTHING if row.step is None else str(row.step)),
        Text(words.loss(row.loss)),
        Text(words.count(row.tokens_per_s)),
        Text(bar[0]).append(bar[1], style="cyan").append(bar[2], style="dim"),
        Text(both),
        Text("" if row.memory_bytes is None else f"{units.memory_gb(row.memory_bytes)} GB"),
        Text(heartbeat, style="yellow" if is_silent(row) else "dim"),
    ]


def _table(columns: Sequence[Column], rows: Sequence[tuple[bool, list[Text]]], width: int, name: str, importance: int) -> Section:
    """A table that keeps the rows that need action when there is no room for all."""

    def draw(room: int) -> list[Text]:
        numbers = list(range(len(rows)))
        if len(rows) + 1 > room:
            urgent_first = sorted(numbers, key=lambda number: (not rows[number][0], number))
            numbers = sorted(urgent_first[: max(0, room - 2)])
        content = lay(columns, [rows[number][1] for number in numbers], width)
        if len(numbers) < len(rows):
            hidden = [cells for number, (_, cells) in enumerate(rows) if number not in numbers]
            more = sum(not cells[0].plain.startswith(_CONTINUED) for cells in hidden)
            content.append(Text(f" … {more} more {name}" if more else " …", style="dim"))
        return content[:room]

    most = len(rows) + 1 if rows else 0
    return Section(draw, min(3, most), most, importance)
