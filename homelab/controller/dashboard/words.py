"""Numbers as people read them, and small pictures made of characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

from homelab.controller.base import units

_LEVELS = "▁▂▃▄▅▆▇█"
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
NOTHING = "–"


def duration(seconds: float | None) -> str:
    """38 s, 12 min, 1 h 05 min, 2 d 3 h."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    whole = max(0, round(seconds))
    if whole < 90:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def count(number: float | None) -> str:
    """12 345, with narrow no-break spaces."""
    return NOTHING if number is None or not math.isfinite(number) else f"{round(number):,}".replace(",", "\u202f")


def loss(number: float | None) -> str:
    """Three decimals; four digits are enough of a loss."""
    if number is None:
        return NOTHING
    return f"{number:.3f}" if math.isfinite(number) else str(number)


def perplexity(number: float | None) -> str:
    """exp of a mean loss per token."""
    if number is None or math.isnan(number):
        return NOTHING
    if number > 20:
        return "> 10⁸"
    value = math.exp(number)
    return f"{value:.2f}" if value < 100 else count(value)


def percent(number: float | None) -> str:
    """97 %"""
    return NOTHING if number is None or not math.isfinite(number) else f"{number:.0f} %"


def used_of(used_bytes: int | None, total_bytes: int | None) -> str:
    """14.1/16 GB, in units of 2**30 bytes."""
    if used_bytes is None or not total_bytes:
        return NOTHING
    return f"{units.memory_gb(used_bytes)}/{units.memory_gb(total_bytes, 0)} GB"


def watts(used: float | None, limit: float | None) -> str:
    """212/300 W; nothing where the card does not say."""
    if used is None or not math.isfinite(used):
        return ""
    return f"{used:.0f} W" if limit is None or not math.isfinite(limit) else f"{used:.0f}/{limit:.0f} W"


def seconds(number: float | None) -> str:
    """0.81, 12.4"""
    return NOTHING if number is None or not math.isfinite(number) else f"{number:.2f}" if number < 10 else f"{number:.1f}"


def mean(values: Sequence[float]) -> float:
    """Of finite values; finite, too, although their sum may not be."""
    return min(max(values), max(min(values), sum(value / len(values) for value in values)))


def sparkline(values: Sequence[float], width: int, lowest: float | None = None, highest: float | None = None) -> str:
    """A curve of at most `width` characters. Each stands for the mean of its part; what is not a number is a gap.

    `lowest`, `highest`: the ends of the scale (default: those of the values).
    """
    if width <= 0 or not values:
        return ""
    cells = min(width, len(values))
    means: list[float | None] = []
    for cell in range(cells):
        part = values[cell * len(values) // cells : (cell + 1) * len(values) // cells]
        finite = [value for value in part if math.isfinite(value)]
        means.append(mean(finite) if finite else None)
    measured = [mean for mean in means if mean is not None]
    if not measured:
        return " " * cells
    # In halves: the distance of two floats may be larger than a float.
    low = (min(measured) if lowest is None else lowest) / 2
    span = (max(measured) if highest is None else highest) / 2 - low
    picture = ""
    for one in means:
        level = 0.0 if one is None or span <= 0 else (one / 2 - low) / span
        picture += " " if one is None else _LEVELS[max(0, min(len(_LEVELS) - 1, int(level * len(_LEVELS))))]
    return picture


def blocks(part: float | None, width: int) -> tuple[str, str]:
    """The filled and the empty part of a bar of `width` characters, in eighths of one; both are empty where `part` (0 to 1) is not known."""
    if part is None or not math.isfinite(part):
        return "", ""
    whole, eighths = divmod(round(8 * width * min(1.0, max(0.0, part))), 8)
    filled = "█" * whole + _EIGHTHS[eighths]
    return filled, "░" * (width - len(filled))


def bar(parts: Sequence[float | None], width: int) -> tuple[str, ...]:
    """Three strings, `width` long together, in the proportion of the three numbers; empty where they are not known."""
    known = [part for part in parts if part is not None and math.isfinite(part) and part >= 0]
    if len(known) < len(parts) or not math.isfinite(sum(known)) or sum(known) <= 0:
        return ("",) * len(parts)
    ends = [round(width * sum(known[: number + 1]) / sum(known)) for number in range(len(known))]
    return tuple(sign * (end - begin) for sign, begin, end in zip("━┄·", [0, *ends], ends, strict=False))
