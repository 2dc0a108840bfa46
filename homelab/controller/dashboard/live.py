"""The loop: look, draw, wait. Watching never touches the run; Ctrl-C ends only the watching."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from homelab.controller.dashboard import interactive, keyboard, view
from homelab.controller.dashboard.plain_characters import has_unicode
from homelab.controller.dashboard.snapshot import Snapshot

_REDRAWS_PER_S = 2.0  # so that a resized window is filled soon, between two looks


@dataclass(frozen=True)
class Watched:
    """How a watching ended: the run is over, a person left it with the key q, or interrupted it. `last` is the last picture, None where there was none yet."""

    last: Snapshot | None
    end: Literal["over", "left", "interrupted"]


class _Screen:
    """A snapshot that is drawn for the terminal's size at the moment of drawing."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield view.render(self.snapshot, options.max_width, console.height, is_ascii=is_ascii(console))


def can_draw(console: Console) -> bool:
    """Whether this is a terminal on which a picture can replace the one before (TERM=dumb, a shell in an editor, cannot)."""
    return console.is_terminal and not console.is_dumb_terminal


def is_ascii(console: Console) -> bool:
    """Whether the console's terminal shows ASCII alone."""
    return not has_unicode(console.encoding, os.environ)


def _keys_of(console: Console) -> int | None:
    """The descriptor that keys come from; None where standard input is no terminal, or the picture goes elsewhere."""
    try:
        return sys.stdin.fileno() if console.file.isatty() and keyboard.can_open(sys.stdin.fileno()) else None
    except (OSError, ValueError, AttributeError):  # standard input is closed, or replaced
        return None


def watch(
    collect: Callable[[], Snapshot],
    console: Console,
    *,
    refresh_s: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
    on_leave: Callable[[], None] = lambda: None,
    again: str = "",
) -> Watched:
    """Draw what `collect` sees until the run is over, then leave the last picture standing.

    On a terminal that can (`can_draw`) it fills the screen, with keys where standard input is one, too; elsewhere it prints one line
    whenever something has changed. Ctrl-C and the key q stop the watching, not the run, and say so; `on_leave` is called first, because with
    keys `collect` may be at work in another thread; `again` is the command that looks once more. What `collect` raises goes through.
    """
    last: Snapshot | None = None

    def keep(snapshot: Snapshot) -> None:
        nonlocal last
        last = snapshot

    descriptor = _keys_of(console) if can_draw(console) else None
    try:
        if descriptor is not None:
            watched = interactive.Watching(collect, refresh_s, keep, on_leave)
            interactive.watch(watched, console, descriptor, is_ascii=is_ascii(console))
        else:
            _watch_without_keys(collect, console, refresh_s, sleep, keep)
    except KeyboardInterrupt:
        _leave(last, console, again)
        return Watched(last, "interrupted")
    if last is None or not last.is_over:
        _leave(last, console, again)
        return Watched(last, "left")
    if can_draw(console):
        console.print(view.render(last, console.width, None, is_ascii=is_ascii(console)))
    return Watched(last, "over")


def _watch_without_keys(
    collect: Callable[[], Snapshot], console: Console, refresh_s: float, sleep: Callable[[float], None], keep: Callable[[Snapshot], None]
) -> None:
    """The picture, or a line whenever something has changed."""

    def looks() -> Iterator[Snapshot]:
        while True:
            snapshot = collect()
            keep(snapshot)
            yield snapshot
            if snapshot.is_over:
                return
            sleep(refresh_s)

    if can_draw(console):
        with Live(Text(" asking the nodes ..."), console=console, screen=True, refresh_per_second=_REDRAWS_PER_S) as screen:
            for snapshot in looks():
                screen.update(_Screen(snapshot), refresh=True)
        return
    last_line = ""
    for snapshot in looks():
        if (line := view.one_line(snapshot)) != last_line:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            last_line = line


def _leave(last: Snapshot | None, console: Console, again: str) -> None:
    if last is not None and can_draw(console):
        console.print(view.render(last, console.width, None, is_ascii=is_ascii(console)))
    if last is None or not last.is_over:
        stop = next((next_.command for next_ in last.next_commands if next_.purpose == "stop"), "") if last else ""
        ways = [f"  {purpose} {command}" for purpose, command in (("to look again:", again), ("to end it:    ", stop)) if command]
        for text in ("The run continues without the dashboard.", *ways):  # each command in a line of its own, to be copied
            console.print(text, markup=False, highlight=False, soft_wrap=True)
