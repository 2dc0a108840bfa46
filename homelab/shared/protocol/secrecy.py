"""How a secret is found in words, by its value. Pure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HIDDEN = "***"
_LEAST = 8  # characters; a shorter value is part of ordinary words
# A path or an address names where a secret is, and is none.
_NO_SECRET = re.compile(r"[/~.]|\w+://|\d+$")


def searched(values: Iterable[str]) -> list[str]:
    """What is searched for: each line of each value (a private key has many), also as JSON writes it; the longest first, one may be part of another."""
    return sorted({form for value in values for form in _forms(value)}, key=len, reverse=True)


def _forms(value: str) -> Iterator[str]:
    for line in value.splitlines():
        word = line.strip()
        if len(word) >= _LEAST and not _NO_SECRET.match(word) and not word.startswith("-----"):
            yield from (word, json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])


def hide(text: str, words: Iterable[str]) -> str:
    """The same text with `***` for every word of `searched`."""
    for word in words:
        if word in text:
            text = text.replace(word, HIDDEN)
    return text
