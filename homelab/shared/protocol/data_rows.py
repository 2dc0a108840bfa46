"""The first rows of a data file, and its longest ones: what is looked at before a launch, on the controller and on a node."""

from __future__ import annotations

import heapq
import json
import os
import re
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

LONGEST_ROWS = 3
BLANK_LINE = re.compile(rb"\n\s*\n|\r\s*\r\n?")  # with all space around it: lines end as on Linux, Windows or the first Macs
_LONGEST_BYTES = 1 << 20  # of the text of one such row; of a longer one only the size is sent
_SCAN_S = 10.0


def longest_after(path: str, skipped_bytes: int) -> list[JsonObject]:
    """The longest lines of a .jsonl file behind those `skipped_bytes`: [{"line", "bytes", "text" (None where it is too long to be sent)}].

    None of other kinds, whose rows cannot be told without a parser. At most `_SCAN_S` seconds of a file are read.
    """
    if os.path.splitext(path)[1] != ".jsonl":
        return []
    longest: list[tuple[int, int, str | None]] = []
    until = time.monotonic() + _SCAN_S
    with open(path, "rb") as stream:
        first = stream.read(skipped_bytes).count(b"\n") + 1
        for number, line in enumerate(stream, start=first):
            if len(longest) < LONGEST_ROWS or len(line) > longest[0][0]:
                text = line.decode("utf-8", "replace") if len(line) <= _LONGEST_BYTES else None
                row = (len(line), number, text)
                if len(longest) < LONGEST_ROWS:
                    heapq.heappush(longest, row)
                else:
                    heapq.heapreplace(longest, row)
            if number % 4096 == 0 and time.monotonic() > until:
                break
    return [{"line": number, "bytes": size, "text": text} for size, number, text in sorted(longest, reverse=True)]


def beginning(path: str, limit_bytes: int) -> tuple[bytes | None, bool]:
    """(the first rows of a data file, whether these are all of them). None for rows where a cut could not be told from a fault."""
    suffix = os.path.splitext(path)[1]
    with open(path, "rb") as stream:
        rows = stream.read(limit_bytes + 1)
    if len(rows) <= limit_bytes:
        return rows, True
    if suffix == ".jsonl":
        end = rows.rfind(b"\n") + 1
    elif suffix == ".csv":
        end = rows.rfind(b"\n") + 1
        while end and rows.count(b'"', 0, end) % 2:  # inside of quotes
            end = rows.rfind(b"\n", 0, end - 1) + 1
    elif suffix == ".txt":
        end = max((blank.end() for blank in BLANK_LINE.finditer(rows)), default=0)
    elif suffix == ".json":
        return _first_of_list(rows), False
    elif suffix == ".parquet":
        return None, False
    else:  # no data file: its first bytes say what it is
        return rows[:limit_bytes], False
    return (rows[:end] or None), False


def _first_of_list(rows: bytes) -> bytes | None:
    """The whole elements at the start of a JSON list that is cut somewhere, as a list."""
    text = rows.decode("utf-8-sig", "ignore")
    decoder, end = json.JSONDecoder(), 0
    match = re.match(r"\s*\[\s*", text)
    place = match.end() if match else len(text)
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except ValueError:
            break
        more = re.compile(r"\s*,\s*").match(text, end)
        if more is None:
            break
        place = more.end()
    return (f"{text[:end]}]").encode() if end else None
