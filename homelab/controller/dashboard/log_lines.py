"""The log tails of all ranks as one, in which equal lines of several ranks are one line. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TAIL_LINES = 200  # of each rank


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
