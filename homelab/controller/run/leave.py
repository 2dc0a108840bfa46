"""A leave: a node that its owner wants for something else, for a while. Whether it is over, and what the events of a run tell of leaves. Pure.

A person types it (`Leave`), or the node sees signs of its owner (`homelab.controller.run.house`). It is no fault.
A run saves, goes on without the node, and takes it back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from homelab.controller.base import units
from homelab.controller.base.models import WireModel
from homelab.controller.run import events
from homelab.shared.protocol.house_messages import HouseSign

MOST_S = 366 * 24 * 3600.0
_WISH_S = 24 * 3600.0
Moment = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
HOURS = "it is outside its hours"
"""Why a node is its owner's that trains at other hours."""


@dataclass(frozen=True)
class Away:
    """That a node is with its owner: `until` when, as people read it, "" without an end; and why, "" where a person typed it."""

    until: str = ""
    because: str = ""


class Leave(WireModel):
    """`since` and `until` in seconds since 1970, `until` None: until the node is taken back by hand. `for_s`: how long it is where a duration was
    named, which is counted by a clock that nobody sets. `is_back`: it was taken back by hand. `against`: then these signs of its owner
    (`sign_key`) do not count until each is gone once.
    """

    node: Annotated[str, Field(max_length=200)]
    since: Moment
    until: Moment | None = None
    for_s: Annotated[float, Field(gt=0, le=MOST_S, allow_inf_nan=False)] | None = None
    is_back: bool = False
    against: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=64)] = ()

    def until_words(self, now: float) -> str:
        """ "23:00", in the time of this machine; empty without an end."""
        return units.local_moment(self.until, now) if self.until is not None else ""

    def overridden(self, now: float) -> tuple[str, ...]:
        """The signs that do not count at a start: of a wish that is old nobody knows whether they were gone in between."""
        return self.against if self.is_back and 0 <= now - self.since < _WISH_S else ()


class LeaveClock:
    """Which leaves last. It remembers when it has seen each for the first time.

    `--until 23:00` is over when the clock of this machine shows it, whoever has set that clock. `--for 2h` is over two hours after it was seen first,
    by the monotonic `now_s`: a clock that jumps makes it neither shorter nor longer. Another process that looks later takes what is left by the clock,
    and never more than the whole duration.
    """

    def __init__(self) -> None:
        self._ends_s: dict[str, tuple[Leave, float]] = {}

    def lasting(self, leaves: Iterable[Leave], now: float, now_s: float) -> dict[str, Leave]:
        """Node -> its leave, of those that are not over. `now` in seconds since 1970."""
        return {leave.node: leave for leave in leaves if not self._is_over(leave, now, now_s)}

    def _is_over(self, leave: Leave, now: float, now_s: float) -> bool:
        if leave.is_back:
            return True
        if leave.until is None:
            return False
        if leave.for_s is None:
            return now >= leave.until
        seen, ends_s = self._ends_s.get(leave.node, (None, 0.0))
        if seen != leave:
            ends_s = now_s + min(leave.for_s, leave.until - now)
            self._ends_s[leave.node] = leave, ends_s
        return now_s >= ends_s


@dataclass(frozen=True)
class LeaveTimes:
    """How often a node was given back while a run went on, and for how long in all."""

    count: int = 0
    seconds: float = 0.0


def sentence(node: str, away: Away) -> str:
    """ "tower was given back to its owner until 23:00", "tower was given back to its owner: steam runs there"."""
    return events.given_back(None, node, away.until, away.because).sentence


def sign_key(sign: HouseSign) -> str:
    """What names a sign, whichever process it comes from."""
    return f"{sign.kind}:{sign.name}"


def lasting(lines: Iterable[Mapping[str, Any]]) -> dict[str, Away]:
    """Node that is with its owner -> until when and why, as the events of a run have said it last."""
    away: dict[str, Away] = {}
    for event, node, _ in _told(lines):
        if event.kind == "given-back":
            away[node] = Away(str(event.values.get("until") or ""), str(event.values.get("because") or ""))
        elif event.kind == "came-back":
            away.pop(node, None)
    return away


def lent(lines: Iterable[Mapping[str, Any]]) -> set[str]:
    """Nodes that were given back and have not taken part in an attempt since."""
    found: set[str] = set()
    for event, node, line in _told(lines):
        if event.kind == "given-back":
            found.add(node)
        elif event.kind == "attempt-resumed" and isinstance(line.get("nodes"), list):
            found.difference_update(name for name in line["nodes"] if isinstance(name, str))
    return found


def times(lines: Iterable[Mapping[str, Any]], end: float) -> dict[str, LeaveTimes]:
    """Node -> its leaves, of one that lasts up to `end`. A clock that was set back in between makes a leave 0 s long, not less."""
    since: dict[str, float] = {}
    found: dict[str, LeaveTimes] = {}

    def over(node: str, moment: float) -> None:
        if node in since:
            before = found.get(node, LeaveTimes())
            found[node] = LeaveTimes(before.count + 1, before.seconds + max(0.0, moment - since.pop(node)))

    for event, node, line in _told(lines):
        if event.kind == "given-back":
            since.setdefault(node, float(line["time"]))
        elif event.kind == "came-back":
            over(node, float(line["time"]))
    for node in list(since):
        over(node, end)
    return found


def times_words(node: str, spent: LeaveTimes) -> str:
    """ "tower was given back 2 times, 0 h 14 min"."""
    minutes = round(spent.seconds / 60)
    return f"{node} was given back {'once' if spent.count == 1 else f'{spent.count} times'}, {minutes // 60} h {minutes % 60:02d} min"


def moves(lines: Iterable[Mapping[str, Any]]) -> int:
    """How many attempts began only because a node was given back or came back: they are no restarts."""
    return sum(line.get("event") == "restart" and line.get("kind") in events.OF_THE_HOUSE for line in lines)


def is_waiting(lines: Iterable[Mapping[str, Any]]) -> bool:
    """Whether the run could not go on since its newest attempt began."""
    waits = False
    for event, _, _ in _told(lines):
        waits = event.kind == "waiting" or (waits and not event.begins_an_attempt)
    return waits


def _told(lines: Iterable[Mapping[str, Any]]) -> Iterable[tuple[events.Event, str, Mapping[str, Any]]]:
    for line in lines:
        event = events.read(line)
        yield event, str(event.values.get("node") or ""), line
