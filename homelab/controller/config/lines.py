"""Where in a TOML text a key stands: `tomllib` and tomlkit keep no line numbers, and a person with a wrong key needs one."""

from __future__ import annotations

import re

from homelab.controller.base.errors import InputError

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*("(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)\s*=""")

_MOST_PARTS = 32
# At the begin of a line (of a header, too) or in an inline table: this many names with dots between them. Nothing is tried twice (`*+`).
_NAME = r"""(?:[A-Za-z0-9_-]++|"[^"\n]*+"|'[^'\n]*+')"""
_DEEP = re.compile(rf"(?:^|[{{,])[ \t]*+\[{{0,2}}+[ \t]*+(?:{_NAME}[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}", re.MULTILINE)


def not_deep(text: str, where: str) -> str:
    """The text, whose keys can be read in no time. Raises InputError for one of over 32 parts: `tomllib` takes minutes for 100,000."""
    if deep := _DEEP.search(text):
        begin = len(deep[0]) - len(deep[0].lstrip(" \t{,["))
        raise InputError(
            f"a key of over {_MOST_PARTS} parts ({deep[0][begin : begin + 20]}...); keys of homelab have at most three",
            where=f"{where}, line {text.count(chr(10), 0, deep.start() + 1) + 1}", hint='remove that line, or write it as key = "text"',
        )  # fmt: skip
    return text


def key_lines(text: str) -> dict[tuple[str | int, ...], int]:
    """Line number (from 1) of every table header and key, by its path, e.g. ("nodes", 0, "host") -> 7.

    Good enough for the files people write here: multi-line strings that look like keys can add entries, never lose any.
    """
    lines: dict[tuple[str | int, ...], int] = {}
    counts: dict[str, int] = {}
    table: tuple[str | int, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            name = header.group(2).strip().strip("\"'")
            if header.group(1) == "[[":
                table = (name, counts.get(name, 0))
                counts[name] = counts.get(name, 0) + 1
            else:
                first, *rest = (part.strip().strip("\"'") for part in name.split("."))
                last = (counts[first] - 1,) if first in counts else ()  # [nodes.environment] belongs to the last [[nodes]]
                table = (first, *last, *rest)
            lines.setdefault(table, number)
        elif key := _KEY.match(line):
            path = tuple(part.strip("\"'") for part in _split_dotted(key.group(1)))
            lines.setdefault((*table, *path), number)
    return lines


def _split_dotted(key: str) -> list[str]:
    return [key] if key[:1] in "\"'" else key.split(".")


def line_of(lines: dict[tuple[str | int, ...], int], path: tuple[str | int, ...]) -> int | None:
    """The line of `path`, or of its nearest parent that has one (a key inside an inline table has its parent's line)."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None
