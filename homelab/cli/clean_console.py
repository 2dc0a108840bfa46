"""rich's Console, through which nothing passes that a terminal obeys, and in which brackets and colons of a text mean nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from homelab.controller.base.sanitize import plain_piece


class CleanConsole(Console):
    """Text in it is text: no markup (a node's "[link=...]" would be one), no :emoji:; each piece is made harmless before it is placed."""

    def __init__(self, *, stderr: bool = False, file: IO[str] | None = None, highlight: bool = True) -> None:
        super().__init__(stderr=stderr, file=file, highlight=highlight, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich does; the tables within come by here, too, so that columns are as wide as what is seen."""
        for segment in super().render(renderable, options):
            if segment.control or (segment.text.isascii() and segment.text.isprintable()):
                yield segment
            else:
                yield Segment(plain_piece(segment.text), segment.style)
