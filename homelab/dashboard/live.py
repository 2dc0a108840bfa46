"""The loop: look, draw, wait. Watching never touches the run; Ctrl-C ends only the watching."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from homelab.dashboard import view
from homelab.dashboard.snapshot import Snapshot
from homelab.runs.state import FINISHED

_REDRAWS_PER_S = 2.0  # so that a resized window is filled soon, between two looks

# rich's own, without its web fonts: a picture in a README must not load anything.
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xml:space="preserve" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


class _Screen:
    """A snapshot that is drawn for the terminal's size at the moment of drawing."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield view.render(self.snapshot, options.max_width, console.height)


def can_draw(console: Console) -> bool:
    """Whether this is a terminal on which a picture can replace the one before (TERM=dumb, a shell in an editor, cannot)."""
    return console.is_terminal and not console.is_dumb_terminal


def watch(
    collect: Callable[[], Snapshot],
    console: Console,
    *,
    refresh_s: float = 2.0,
    sleep: Callable[[float], None] = time.sleep,
    ends: Callable[[Snapshot], bool] = lambda snapshot: snapshot.state in FINISHED,
) -> Snapshot | None:
    """Draw what `collect` sees until `ends` says so (done, failed or stopped), then leave the last picture standing.

    On a terminal that can (`can_draw`) it fills the screen; elsewhere it prints one line whenever something has changed. Ctrl-C stops the
    watching, not the run, and says so. The last Snapshot, or None when Ctrl-C came before the first. What `collect`
    raises goes through.
    """
    last: Snapshot | None = None
    try:
        if can_draw(console):
            with Live(
                Text(" asking the nodes ..."), console=console, screen=True, refresh_per_second=_REDRAWS_PER_S
            ) as screen:
                while last is None or not ends(last):
                    if last is not None:
                        sleep(refresh_s)
                    last = collect()
                    screen.update(_Screen(last), refresh=True)
        else:
            last_line = ""
            while last is None or not ends(last):
                if last is not None:
                    sleep(refresh_s)
                last = collect()
                if (line := view.one_line(last)) != last_line:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                    last_line = line
    except KeyboardInterrupt:
        _leave(last, console)
        return last
    if can_draw(console):
        console.print(view.render(last, console.width, None))
    return last


def _leave(last: Snapshot | None, console: Console) -> None:
    if last is not None and can_draw(console):
        console.print(view.render(last, console.width, None))
    if last is None or last.state not in FINISHED:
        stop = next((next_.command for next_ in last.next_commands if next_.purpose == "stop"), "") if last else ""
        ending = f"; to end it: {stop}" if stop else ""
        console.print(f"The run goes on without you watching{ending}", markup=False, highlight=False, soft_wrap=True)


def export_svg(snapshot: Snapshot, path: Path, *, width: int = 100, height: int | None = None) -> None:
    """Write the dashboard as an SVG picture, replacing `path` in one step. Raises OSError where the disk refuses."""
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(view.render(snapshot, width, height))
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(console.export_svg(title=f"homelab status {snapshot.run}", code_format=_SVG), encoding="utf-8")
    os.replace(beside, path)
