"""JSON from a node, bounded before it is believed: so many bytes, so many values, so deep. A small text of brackets takes gigabytes as objects."""

from __future__ import annotations

import json
from typing import Any

MOST_VALUES = 200_000
_MOST_DEPTH = 64
_INTEGER_DIGITS = 19  # of a counter of a machine; more is a number that none counts


def decoded(text: bytes, most_values: int = MOST_VALUES) -> Any:
    """The value of one JSON text. Raises ValueError for what is none, or is more than this program keeps."""
    # Every value but the first of its list or object is behind a comma; commas in words count, too.
    values = text.count(b",") + text.count(b"[") + text.count(b"{")
    if values > most_values:
        raise ValueError(f"it holds {values} values, of at most {most_values}")
    try:
        value = json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _refuse_depth(value)
    return value


def _integer(digits: str) -> int | float:
    """A number of thousands of digits is an infinity: who expects a whole number refuses it."""
    return int(digits) if len(digits) <= _INTEGER_DIGITS else float(digits)


def _refuse_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MOST_DEPTH):
        level = [child for one in level for child in (one.values() if isinstance(one, dict) else one) if isinstance(child, dict | list)]
        if not level:
            return
    raise ValueError("it is nested too deeply")
