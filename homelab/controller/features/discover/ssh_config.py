"""The names that an ssh_config holds, and nothing of their meaning: that is what `ssh -G NAME` is asked for. Pure.

paramiko's own reader does not follow `Include`, and stops at `Match all`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator

Include = Callable[[str], Iterable[str]]
"""Pattern of an Include line -> the texts of the files that it names."""

_MOST_DEPTH = 16  # OpenSSH's own (readconf.c, READCONF_MAX_DEPTH)
_LINE = re.compile(r"^\s*([A-Za-z]+)(?:\s+|\s*=\s*)(.*)$")


def host_names(text: str, include: Include) -> list[str]:
    """Every literal word of the `Host` lines, in the order of the files, each once; patterns (`*`, `?`, `!`) are none.

    Include lines are followed wherever they stand, inside Host and Match blocks too.
    """
    return list(dict.fromkeys(_names(text, include, 0)))


def _names(text: str, include: Include, depth: int) -> Iterator[str]:
    for line in text.splitlines():
        found = _LINE.match(line)
        keyword = found[1].lower() if found else ""
        if keyword == "host" and found:
            yield from (word for word in _words(found[2]) if not set(word) & set("*?!"))
        elif keyword == "include" and found and depth < _MOST_DEPTH:
            for pattern in _words(found[2]):
                for inner in include(pattern):
                    yield from _names(inner, include, depth + 1)


def _words(text: str) -> list[str]:
    """The words of a line: quotes hold spaces together, and `#` begins a comment."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # a quote that does not end: ssh refuses the line, too
        return []
