"""The part of the picture that shows the logs: all ranks as one, or the chosen rank; the newest lines, or older ones. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rich.text import Text

from homelab.controller.dashboard.columns import clip
from homelab.controller.dashboard.log_noise import without_noise
from homelab.controller.dashboard.screen import Section
from homelab.controller.dashboard.snapshot import RankRow, Snapshot
from homelab.controller.dashboard.view_state import ViewState

_TAIL_LINES = 200  # of each rank
_LINES_UNBOUNDED = 15  # where no height is given
_WIDE = 70  # cells from which on there is room for "x3, ranks 0 to 2"
_MOST_LABEL = 24


def log_lines(snapshot: Snapshot, rank: int | None) -> tuple[LogLine, ...]:
    """The log that is shown: of this rank, or of all."""
    return _folded(tuple((row.rank, _own_lines(row, snapshot)) for row in snapshot.ranks if rank is None or row.rank == rank))


@lru_cache(maxsize=4)
def _folded(tails: tuple[tuple[int, tuple[str, ...]], ...]) -> tuple[LogLine, ...]:
    """Kept, because a key redraws the same lines."""
    return folded(dict(tails))


def section(snapshot: Snapshot, width: int, state: ViewState, *, is_bounded: bool) -> Section:
    """A heading and as many lines as there is room for."""
    lines = log_lines(snapshot, state.rank)
    end = max(1, len(lines) - state.lines_up)
    shown = lines[:end]
    most = 1 + (len(shown) if is_bounded else min(len(shown), _LINES_UNBOUNDED)) if lines else 0

    def draw(room: int) -> list[Text]:
        part = shown[-(room - 1) :] if room > 1 else ()
        labels = [line.who(is_short=width < _WIDE) for line in part]
        cells = min(_MOST_LABEL, max(map(len, labels), default=0))
        heading = Text(_heading(snapshot, state, len(lines) - end), style="dim")
        return [clip(heading, width)] + [
            clip(Text.assemble("   ", (f"{clip(Text(label), cells).plain:<{cells}}  ", "dim"), line.text), width)
            for label, line in zip(labels, part, strict=True)
        ]

    return Section(draw, min(2, most), most, 7, is_optional=not state.lines_up and state.rank is None)


def _heading(snapshot: Snapshot, state: ViewState, hidden: int) -> str:
    node = next((row.node for row in snapshot.ranks if row.rank == state.rank), "")
    whose = " log" if state.rank is None else f" log of rank {state.rank} on {node}"
    return f"{whose}, {hidden} newer lines below" if hidden else whose


def _own_lines(row: RankRow, snapshot: Snapshot) -> tuple[str, ...]:
    """Without what is told elsewhere (a note stands in the panel above), and with the noise of torch in one line."""
    return tuple(without_noise([line for line in row.log_tail if line.removeprefix("note: ") not in snapshot.notes], least=1))


@dataclass(frozen=True)
class LogLine:
    """What these ranks have printed."""

    text: str
    ranks: tuple[int, ...]

    def who(self, *, is_short: bool) -> str:
        """'x3, ranks 0 to 2', 'rank 1'; short: '0-2', '1'."""
        spans = _spans(self.ranks)
        if is_short:
            return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        named = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in spans)
        return f"x{len(self.ranks)}, ranks {named}"


def folded(tails: Mapping[int, Sequence[str]]) -> tuple[LogLine, ...]:
    """All lines, each rank's in its own order. Lines that several ranks have in common, in the same order, become one.

    The lines have no times: between two lines in common those of the lower rank come first.
    """
    merged: list[LogLine] = []
    for rank in sorted(tails):
        own = list(tails[rank][-_TAIL_LINES:])
        merged = _merge(merged, own, rank)
    return tuple(merged)


def _merge(merged: Sequence[LogLine], own: Sequence[str], rank: int) -> list[LogLine]:
    matcher = difflib.SequenceMatcher(None, [line.text for line in merged], own, autojunk=False)
    content: list[LogLine] = []
    place_merged = place_own = 0
    for match in matcher.get_matching_blocks():
        content += merged[place_merged : match.a]
        content += [LogLine(text, (rank,)) for text in own[place_own : match.b]]
        content += [LogLine(line.text, (*line.ranks, rank)) for line in merged[match.a : match.a + match.size]]
        place_merged, place_own = match.a + match.size, match.b + match.size
    return content


def _spans(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of consecutive numbers: 0 1 2 5 -> (0, 2) (5, 5)."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], rank)
        else:
            spans.append((rank, rank))
    return spans
