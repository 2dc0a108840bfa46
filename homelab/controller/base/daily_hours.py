"""Hours that return every day, as people write them: "23:00-07:00, 12:00-13:00". Minutes are those since midnight, of whichever clock is meant. Pure."""

from __future__ import annotations

import re

DAY = 24 * 60
_ALLOWED = 'hours like "23:00-07:00", or several with commas; times from 00:00 to 23:59'
Spans = tuple[tuple[int, int], ...]
"""First minute of each span, and the first behind it, which is the smaller one if the span goes over midnight."""


def minute(text: str) -> int:
    """Of "HH:MM". Raises ValueError."""
    found = re.fullmatch(r"(\d{1,2}):(\d{2})", text.strip(), re.ASCII)
    if found is None or int(found[1]) > 23 or int(found[2]) > 59:
        raise ValueError(_ALLOWED)
    return int(found[1]) * 60 + int(found[2])


def clock(of_minute: int) -> str:
    """ "HH:MM"."""
    return f"{of_minute // 60:02d}:{of_minute % 60:02d}"


def spans(text: str) -> Spans:
    """Of "HH:MM-HH:MM", several with commas between. Raises ValueError."""
    found = []
    for part in text.split(","):
        begins, dash, ends = part.partition("-")
        if not dash:
            raise ValueError(_ALLOWED)
        span = minute(begins), minute(ends)
        if span[0] == span[1]:
            raise ValueError(f"{_ALLOWED}, with another end than {clock(span[0])}")
        found.append(span)
    return tuple(found)


def tidy(text: str) -> str:
    """The same hours, written in one way; "" (all hours) stays so. Raises ValueError."""
    return ", ".join(f"{clock(begins)}-{clock(ends)}" for begins, ends in spans(text)) if text else ""


def is_within(span: tuple[int, int], now: int) -> bool:
    """Whether the minute `now` is in the span; its end is not."""
    begins, ends = span
    return (now - begins) % DAY < (ends - begins) % DAY


def opens(of_spans: Spans, now: int) -> int | None:
    """The minute at which the next span begins; None if one of them has begun."""
    if any(is_within(span, now) for span in of_spans):
        return None
    return min((begins for begins, _ in of_spans), key=lambda begins: (begins - now) % DAY)
