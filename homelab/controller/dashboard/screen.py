"""Sharing out the lines of a screen: every part says how few and how many lines it wants, the important ones first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text


@dataclass(frozen=True)
class Section:
    """A part of the picture: `draw(n)` gives at most n lines; `least` is what it is worth showing with, `most` is all.

    `importance` 0 comes first. What `is_optional` gets only what the others leave.
    """

    draw: Callable[[int], list[Text]]
    least: int
    most: int
    importance: int
    is_optional: bool = False


def joined(parts: Sequence[list[Text]]) -> list[Text]:
    """All parts with an empty line between them."""
    together: list[Text] = []
    for part in parts:
        together += [Text(), *part] if together else part
    return together


def fixed(content: list[Text], importance: int) -> Section:
    """A section that is shown whole or not at all."""
    return Section(lambda room: content[:room], len(content), len(content), importance)


def fitted(sections: Sequence[Section], room: int) -> list[list[Text]]:
    """Every section drawn with as many of `room` lines as it can have, empty where it got none.

    The more important ones come first, but leave the others that are not optional the least they are worth showing with.
    """
    heights = [0] * len(sections)
    order = sorted(range(len(sections)), key=lambda number: sections[number].importance)
    left = room
    for place, number in enumerate(order):
        section = sections[number]
        blank = 1 if any(heights) else 0  # the empty line between two sections
        reserved = sum(sections[later].least + 1 for later in order[place + 1 :] if not sections[later].is_optional)
        offer = max(min(section.least, left - blank), min(section.most, left - blank - reserved))
        if offer >= section.least:
            heights[number], left = offer, left - blank - offer
    return [section.draw(count) if count else [] for section, count in zip(sections, heights, strict=True)]
