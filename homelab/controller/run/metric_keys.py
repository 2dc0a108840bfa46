"""Which lines of metrics.jsonl are one, and which a resumed attempt has undone. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = dict[str, Any]


Key = tuple[Any, ...]


def key(line: Mapping[str, Any]) -> Key:
    """What makes a line this one and no other."""
    return tuple(line.get(name) for name in ("kind", "attempt", "rank", "step", "message"))


def undone(lines: Sequence[Line], resumed: Mapping[int, int]) -> set[Key]:
    """The keys of lines that a later attempt has replaced. `resumed`: attempt -> the step after which it went on.

    Pure. An attempt that has done no step has replaced nothing yet.
    """
    trained = {line["attempt"] for line in lines if line.get("kind") == "train" and line.get("attempt") in resumed}
    newest: dict[Key, int] = {}
    for line in lines:
        if line.get("kind") in ("train", "eval"):
            place = (line["kind"], line.get("rank"), line.get("step"))
            newest[place] = max(newest.get(place, 0), line.get("attempt") or 0)
    keys = set()
    for line in lines:
        kind, attempt, step = line.get("kind"), line.get("attempt") or 0, line.get("step") or 0
        is_behind = kind in _OF_A_STEP and any(later > attempt and step > resumed[later] for later in trained)
        if is_behind or newest.get((kind, line.get("rank"), line.get("step")), attempt) > attempt:
            keys.add(key(line))
    return keys


_OF_A_STEP = ("train", "eval", "save", "shares")
