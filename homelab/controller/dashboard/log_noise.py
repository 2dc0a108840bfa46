"""What a log says again and again without telling anything: torch's own chatter, and warnings that repeat. Pure.

A line that names an error is never left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

# The head that torch.distributed and torchrun give a line: "[W1126 01:59:16.328846818 socket.cpp:207] ", "W1126 01:58:40.136000 62 torch/distributed/run.py:852] ".
_CHATTER = re.compile(r"\[?[IW]\d{4} \d\d:\d\d:\d\d\.\d+ [^\]]*:\d+\]|\[[IW] [^\]]*:\d+\]")
_WARNING = re.compile(r"\S.*?:\d+: (?P<text>\w*Warning: .*)")
_OF_LIBRARIES = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")
_HARMLESS = "hostname of the client socket cannot be retrieved"  # gloo, of a name that it does not need
# As tqdm draws it, with a total and without; what is printed behind it on its line is no bar.
# Bounded: a line from a node may be long, and of any kind.
_BAR = re.compile(
    r"(?<!\d)(?:\d{1,3}%\|[^|]{0,400}\| ?[\d.]{1,12}\w?/(?P<total>[\d.]{1,12}\w?)|\d{1,12}\w{0,3}) \[\d{1,3}:\d\d(?::\d\d)?[<,][^\[\]]{0,400}\]$"
)
_ERROR = re.compile(
    r"error|exception|traceback|fail|fatal|abort|refus|denied|reject|timed? ?out|unreachable|cannot|can't|could not|unable|not |missing|"
    r"invalid|mismatch|corrupt|out of memory|killed|terminat|signal|sigterm|exit|\bnan\b|\binf\b|lost|closed|reset|disconnect|hang|stuck|slow|throttl|\bno\b|\btoo\b",
    re.IGNORECASE,
)


def without_noise(lines: Sequence[str], least: int = 2) -> list[str]:
    """The lines, with one line and a count in place of torch's chatter (from `least` lines on); a warning that repeats stands once, with its count."""
    entries = list(_entries(lines))
    chatter = sum(_is_chatter(entry[0]) for entry in entries)
    repeated = Counter(text for entry in entries if (text := _repeatable(entry[0])))
    content: list[str] = []
    told: set[str] = set()
    for entry in entries:
        if chatter >= least and _is_chatter(entry[0]):
            key = "chatter"
            shown: tuple[str, ...] = (f"({chatter} warning{'s' * (chatter != 1)} of torch and its libraries, without an error)",)
        else:
            key = _repeatable(entry[0])
            shown = (f"{entry[0]} (x{repeated[key]})", *entry[1:]) if repeated[key] > 1 else entry
        if key not in told:
            content += shown
        told |= {key} if key else set()
    return content


def newest_bars(lines: Sequence[str]) -> list[str]:
    """The lines; of each progress bar (of one name and total) only as it was drawn last, and no blank line that its drawing left."""
    bars = [_BAR.search(line.rstrip()) for line in lines]
    names = [(line[: bar.start()].strip(" :"), bar["total"]) if bar else None for line, bar in zip(lines, bars, strict=True)]
    newest = {name: number for number, name in enumerate(names) if name}
    if not newest:
        return list(lines)
    entries = enumerate(zip(lines, names, strict=True))
    return [line for number, (line, name) in entries if (newest[name] == number if name else line.strip())]


def _entries(lines: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Each line; a warning together with the line of source that Python prints below it."""
    number = 0
    while number < len(lines):
        below = lines[number + 1] if number + 1 < len(lines) else ""
        size = 2 if _WARNING.match(lines[number]) and below.startswith("  ") and not _ERROR.search(below) else 1
        yield tuple(lines[number : number + size])
        number += size


def _repeatable(line: str) -> str:
    """The text of a warning without an error; "" where it is none."""
    warning = _WARNING.match(line)
    return warning["text"] if warning and not _ERROR.search(warning["text"]) else ""


def _is_chatter(line: str) -> bool:
    if _repeatable(line):
        return _repeatable(line).startswith(_OF_LIBRARIES)
    return _HARMLESS in line or (bool(_CHATTER.match(line)) and not _ERROR.search(line))
