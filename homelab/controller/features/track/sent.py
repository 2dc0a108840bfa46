"""What a tracker has got of a run: every key once, kept as short spans of steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast, get_args

from homelab.controller.features.track.points import Key, Kind, TrackedPoint

# (kind, first step, last step, every how many steps, the attempt that had computed them)
Span = tuple[str, int, int, int, int]
Attempts = Mapping[Key, int]
"""Key -> the attempt that had computed the point when it was sent."""


def certain_step(lines: Iterable[Mapping[str, Any]]) -> int:
    """The step up to which no recovery computes anything again: that of the newest checkpoint that all nodes hold. 0: there is none yet.

    Rank 0 writes a "save" line when every node has begun to write the checkpoint. One that is written in the background is surely there when the
    next one is. `lines`: metrics.jsonl.
    """
    saves = {line["step"]: bool(line.get("in_background")) for line in lines if (line.get("kind"), line.get("rank")) == ("save", 0)}
    steps = sorted(saves)
    return next((step for step in reversed(steps) if step != steps[-1] or not saves[step]), 0)


def due(points: Sequence[TrackedPoint], sent: Attempts) -> list[TrackedPoint]:
    """The points that were never sent, by step. One that was sent and that a recovery computed again is none."""
    return [point for point in points if point.key not in sent]


def repeated(points: Iterable[TrackedPoint], sent: Attempts) -> int:
    """How many points a recovery has computed again after they were sent: the tracker keeps their first values."""
    return sum(1 for point in points if sent.get(point.key, point.attempt) != point.attempt)


def spans(sent: Attempts) -> list[Span]:
    """The same as spans; `attempts_of` is the way back."""
    result: list[Span] = []
    for kind in get_args(Kind):
        steps = sorted(step for of_kind, step in sent if of_kind == kind)
        stride = min((after - before for before, after in pairwise(steps)), default=1)
        for step in steps:
            attempt, last = sent[kind, step], result[-1] if result else None
            if last and (last[0], last[2] + stride, last[4]) == (kind, step, attempt):
                result[-1] = (kind, last[1], step, stride, attempt)
            else:
                result.append((kind, step, step, stride, attempt))
    return result


def attempts_of(value: object) -> dict[Key, int]:
    """Of spans in JSON; what is damaged is left out."""
    sent: dict[Key, int] = {}
    for span in value if isinstance(value, list) else ():
        if _is_span(span):
            kind, first, last, stride, attempt = span
            sent |= {(cast("Kind", kind), step): attempt for step in range(first, last + 1, stride)}
    return sent


def _is_span(value: Any) -> bool:
    if (
        not isinstance(value, list)
        or len(value) != 5
        or value[0] not in get_args(Kind)
        or not all(type(number) is int for number in value[1:])
    ):
        return False
    return bool(value[3] > 0 and value[2] - value[1] < 10_000_000)
