"""The list of runs as lines. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from homelab.controller.dashboard.columns import Column, lay

_COLUMNS = (
    Column("run"), Column("state"), Column("attempt", "right", importance=3), Column("started", importance=1), Column("nodes", importance=2),
)  # fmt: skip
_UNITS = (("year", 365.25 * 86400), ("month", 30.5 * 86400), ("day", 86400.0), ("hour", 3600.0), ("minute", 60.0), ("second", 1.0))


@dataclass(frozen=True)
class RunRow:
    """One run. `created_at`: seconds since 1970, None where it is unknown; `nodes`: that know the run."""

    name: str
    state: str
    attempt: int
    created_at: float | None
    nodes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The `--json` shape."""
        return {**asdict(self), "nodes": list(self.nodes)}


def lines(rows: Sequence[RunRow], now: float, width: int) -> list[Text]:
    """A heading and a line per run. A name is to be copied: it is never cut nor broken.

    Where the columns are too wide the least important are left out; names that are wider than the terminal make longer lines.
    """
    cells = [
        [Text(row.name), Text(row.state), Text(str(row.attempt)), Text(ago(row.created_at, now)), Text(", ".join(row.nodes))]
        for row in rows
    ]
    least = max((cell_len(f"{row.name}  {row.state or 'state'}") for row in rows), default=0)
    return lay(_COLUMNS, cells, max(width, least, cell_len("run  state")), indent=0)


def ago(moment: float | None, now: float) -> str:
    """ "2 hours ago"; a moment that is still to come, because a clock was set back, is told as such."""
    if not moment:
        return ""
    if moment > now + 1.0:
        return time.strftime("%Y-%m-%d %H:%M, ahead of this clock", time.localtime(moment))
    passed_s = max(0.0, now - moment)
    unit, length_s = next(((name, seconds) for name, seconds in _UNITS if passed_s >= seconds), ("", 1.0))
    count = int(passed_s / length_s)
    return f"{count} {unit}{'' if count == 1 else 's'} ago" if unit else "now"
