"""Reading what torchrun and Python print when they fail: the failed ranks, and the exceptions with their places."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from homelab.controller.config.program_command import WRAPPER

_PREFIX = re.compile(r"^(?:\[(?:default|rank)?\d+\]:? ?)+")
_FRAME = re.compile(r'^\s+File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>\w+))?')
_EXCEPTION = re.compile(r"^(?P<type>(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?:: ?(?P<message>.*))?$")
_IGNORED = "Exception ignored in"  # of a destructor, while Python ends: never the reason
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
# What `homelab run` starts a program by is not the person's either.
_LIBRARY = re.compile(rf"site-packages|dist-packages|/lib/python3|/bin/[^/.]+:|<frozen|<string>|/{re.escape(WRAPPER)}:")
_LOG_LINE = re.compile(r"^\[[WEI]\d{3,4} ")
_MESSAGE_LINES = 6  # of an exception whose message has several lines
_MORE_LINES = 60  # that may belong to it behind its first paragraph
_TRACEBACK = "Traceback (most recent call last):"
# A warning of what the program then did without: it goes on (peft, datasets, huggingface_hub and its xet, urllib3, wandb).
_SURVIVED = re.compile(
    r"silently ignoring|latest cached version|\bis deprecated\b|thrown while requesting|retrying (?:in \d|\(Retry\()|before retry|retry loop"
    r"|before the next attempt",
    re.IGNORECASE,
)
# The same where it has several lines: how it begins and how it ends.
_SURVIVED_MESSAGES = (
    ("Unable to fetch remote file due to the following error", "silently ignoring the lookup"),
    ("Error while downloading from", "Trying to resume download"),
)
_RICH_END = "╰──"  # of the frame that rich draws around a traceback; the exception comes behind it

_FIELD = re.compile(r"^ {2}(?P<key>time|host|rank|exitcode|error_file|traceback) *: ?(?P<value>.*)$")
_ENTRY = re.compile(r"^\[\d+\]:$")


@dataclass(frozen=True)
class ChildFailure:
    """One entry of torchrun's ChildFailedError. `time_s` is unix time; exactly one of exit_code and signal is set."""

    rank: int
    exit_code: int | None
    signal: int | None
    time_s: float | None
    is_root: bool
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True)
class Raised:
    """An exception as it was printed: `text` is "KeyError: 'x'", `where` is "train.py:29" with its folder, or empty.

    `where` is the last place in the person's own files, where there is one; `raised_at` is where it was raised. `more` are the lines behind
    the first paragraph of its message that may belong to it.
    """

    type: str
    text: str
    where: str
    raised_at: str = ""
    more: str = ""
    functions: tuple[str, ...] = ()  # of the stack, outermost first


def _unix_time(text: str, near_s: float | None) -> float | None:
    """torchrun prints its node's local time; the time zone follows from a time of the same node close to it."""
    try:
        naive = datetime.strptime(text.strip(), "%Y-%m-%d_%H:%M:%S").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    if near_s is None:
        return naive
    quarter_h = 900.0
    return naive + round((near_s - naive) / quarter_h) * quarter_h


def child_failures(lines: Sequence[str], ended_at: float | None = None) -> tuple[ChildFailure, ...]:
    """The ranks in the last ChildFailedError of torchrun's stderr, as printed by
    torch/distributed/elastic/multiprocessing/errors/__init__.py (torch 2.13); empty when there is none."""
    failures: list[ChildFailure] = []
    fields: dict[str, str] = {}
    traceback: list[str] = []
    is_root = False

    def close() -> None:
        rank = re.match(r"\d+", fields.get("rank", ""))
        code = re.match(r"-?\d+", fields.get("exitcode", ""))
        if rank and code:
            value = int(code[0])
            failures.append(
                ChildFailure(
                    rank=int(rank[0]),
                    exit_code=value if value >= 0 else None,
                    signal=-value if value < 0 else None,
                    time_s=_unix_time(fields.get("time", ""), ended_at),
                    is_root=is_root,
                    traceback=tuple(traceback),
                )
            )
        fields.clear()
        traceback.clear()

    for line in lines:
        if line.startswith("torch.distributed.elastic") and "ChildFailedError" in line:
            close()
            failures, is_root = [], False
        elif _ENTRY.match(line) or re.match(r"^[-=]{20,}$", line):
            close()
        elif line.startswith("Root Cause (first observed failure)"):
            close()
            is_root = True
        elif field := _FIELD.match(line):
            fields[field["key"]] = field["value"]
            if field["key"] == "traceback":
                traceback.append(field["value"])
        elif "traceback" in fields:
            traceback.append(line.removeprefix("  "))
    close()
    return tuple(failures)


def last_exceptions(lines: Sequence[str]) -> tuple[Raised, ...]:
    """The last exception that was printed, and those it was raised from or while handling, oldest first."""
    texts = [_PREFIX.sub("", line) for line in lines]
    chain: list[Raised] = []
    is_linked = False
    position = 0
    if texts and texts[0].startswith("  "):  # a tail may begin in the middle of a traceback
        position, raised = _read_traceback(texts, 0)
        chain = [raised] if raised else []
    while position < len(texts):
        line = texts[position]
        if line.startswith(_CHAINED):
            is_linked = True
        is_rich = line.startswith(_RICH_END)
        if not is_rich and not line.rstrip().endswith(_TRACEBACK):  # a progress bar may stand before it
            position += 1
            continue
        is_ignored = position > 0 and texts[position - 1].startswith(_IGNORED)
        position, raised = _read_traceback(texts, position + 1)
        if raised is not None and not is_ignored:
            chain = [*chain, raised] if is_linked else [raised]
            is_linked = False
    return tuple(chain)


def lasting(lines: Sequence[str]) -> tuple[str, ...]:
    """The lines that may say why a program ended: without the source in a traceback, and without what the program itself says that it survived."""
    kept: list[str] = []
    is_source = False
    for line in lines:
        text = _PREFIX.sub("", line)
        is_source = bool(_FRAME.match(text)) or (is_source and text.startswith("    "))
        if is_source:
            continue
        kept.append(line)
        for begin, end in _SURVIVED_MESSAGES:
            recent = range(max(0, len(kept) - _MORE_LINES), len(kept))
            if end in line and (start := next((number for number in reversed(recent) if begin in kept[number]), None)) is not None:
                del kept[start:]
    return tuple(line for line in kept if not _SURVIVED.search(line))


def is_of_a_library(where: str) -> bool:
    """Whether the place of an exception is in an installed package or in Python itself."""
    return _LIBRARY.search(where) is not None


def _read_traceback(texts: Sequence[str], position: int) -> tuple[int, Raised | None]:
    """From the line after "Traceback": the position behind it, and the exception, or None where the text breaks off."""
    frames: list[str] = []
    functions: list[str] = []
    while position < len(texts) and (texts[position].startswith(" ") or not texts[position]):
        if frame := _FRAME.match(texts[position]):
            frames.append(f"{frame['file']}:{frame['line']}")
            functions.append(frame["function"] or "")
        position += 1
    if position >= len(texts) or not (raised := _EXCEPTION.match(texts[position])):
        return position, None
    message = [texts[position]]
    position += 1
    while position < len(texts) and texts[position].strip() and len(message) < _MESSAGE_LINES:
        if texts[position].rstrip().endswith(_TRACEBACK) or texts[position].startswith(_CHAINED) or _LOG_LINE.match(texts[position]):
            break
        message.append(texts[position])
        position += 1
    own = [frame for frame in frames if not _LIBRARY.search(frame)]
    where, raised_at = (own or frames or [""])[-1], (frames or [""])[-1]
    return position, Raised(
        raised["type"], "\n".join(message).strip(), where, raised_at, _more(texts, position), tuple(filter(None, functions))
    )


def _more(texts: Sequence[str], position: int) -> str:
    """The lines from here on, up to the next exception or line of a log."""
    lines = []
    for line in texts[position : position + _MORE_LINES]:
        if line.rstrip().endswith(_TRACEBACK) or line.startswith(_CHAINED) or _LOG_LINE.match(line):
            break
        lines.append(line)
    return "\n".join(lines).strip()
