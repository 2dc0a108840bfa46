"""The profiles of several ranks as one: the dearest operators, the exchanges, and each rank's memory beside the plan. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from homelab.controller.base.models import DisplayValue
from homelab.controller.features.profile.rank_profile import ExchangeRow, OperatorRow, RankProfile

MOST_OPERATORS = 10


class DearOperator(DisplayValue):
    """One operator over all profiled ranks. Seconds are those on the cards where there are any; `share` of the time of all ranks' steps."""

    name: str
    calls: int
    seconds: float
    share: float
    place: str
    place_share: float | None


class ExchangeOverRanks(DisplayValue):
    """One exchange, of a rank and a step on average. `overlap`: the part of its time in which the rank computes, None where it takes none."""

    name: str
    kind: str
    calls: float
    sent_bytes: float
    seconds: float
    overlap: float | None


class MemoryRow(DisplayValue):
    """The most that a rank held in the profiled steps, and what the plan says."""

    rank: int
    node: str
    peak_bytes: int | None
    peak_phase: str
    predicted_bytes: int | None

    @property
    def error(self) -> float | None:
        """0.05: the plan says 5 % more than was held."""
        return self.predicted_bytes / self.peak_bytes - 1 if self.predicted_bytes and self.peak_bytes else None


def dearest(ranks: Sequence[RankProfile]) -> tuple[DearOperator, ...]:
    """The dearest operators by their own time."""
    is_on_card = any(row.device_s > 0 for rank in ranks for row in rank.operators)
    whole_s = sum(sum(rank.step_s) for rank in ranks)
    by_name: defaultdict[str, list[OperatorRow]] = defaultdict(list)
    for rank in ranks:
        for row in rank.operators:
            by_name[row.name].append(row)

    def seconds(rows: Sequence[OperatorRow]) -> float:
        return sum(row.device_s if is_on_card else row.self_s for row in rows)

    found = []
    for name, rows in sorted(by_name.items(), key=lambda entry: -seconds(entry[1]))[:MOST_OPERATORS]:
        place, part = _place(rows, seconds(rows), is_on_card=is_on_card)
        found.append(DearOperator(
            name=name, calls=sum(row.calls for row in rows), seconds=seconds(rows), share=seconds(rows) / whole_s if whole_s else 0.0, place=place, place_share=part,
        ))  # fmt: skip
    return tuple(found)


def _place(rows: Sequence[OperatorRow], whole_s: float, *, is_on_card: bool) -> tuple[str, float | None]:
    """The dearest place of an operator, in words, and its share."""
    parts: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        for place in row.places:
            about = ", ".join(word for word in (place.class_name, place.source) if word)
            parts[f"{place.module} ({about})" if about else place.module] += place.share * (row.device_s if is_on_card else row.self_s)
    if not parts or whole_s <= 0:
        return "", None
    words = max(parts, key=lambda name: parts[name])
    return words, parts[words] / whole_s


def exchanges(ranks: Sequence[RankProfile]) -> tuple[ExchangeOverRanks, ...]:
    """All exchanges, in the order in which they happen."""
    by_name: dict[str, list[ExchangeRow]] = {}
    for rank in ranks:
        for row in rank.exchanges:
            by_name.setdefault(row.name, []).append(row)
    steps = len(ranks[0].steps)
    return tuple(
        ExchangeOverRanks(
            name=name, kind=rows[0].kind, calls=statistics.mean(row.calls for row in rows) / steps,
            sent_bytes=statistics.mean(row.sent_bytes for row in rows) / steps, seconds=statistics.mean(row.seconds for row in rows) / steps,
            overlap=sum(row.overlap_s for row in rows) / total if (total := sum(row.seconds for row in rows)) > 0 else None,
        )
        for name, rows in by_name.items()
    )  # fmt: skip


def memory(ranks: Sequence[RankProfile], predicted: Mapping[int, int | None]) -> tuple[MemoryRow, ...]:
    """Each rank's peak beside the plan's."""
    return tuple(
        MemoryRow(
            rank=one.rank, node=one.node, peak_bytes=one.memory.peak_bytes, peak_phase=one.memory.peak_phase, predicted_bytes=predicted.get(one.rank),
        )
        for one in ranks
    )  # fmt: skip


def slowdown(ranks: Sequence[RankProfile]) -> float | None:
    """A profiled step over a usual one, of the rank where that is most; None where no step before was usual."""
    return max((statistics.median(one.step_s) / one.usual_step_s for one in ranks if one.usual_step_s), default=None)
