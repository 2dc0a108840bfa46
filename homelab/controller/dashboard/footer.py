"""The last lines of the picture: the next commands, and the keys. Pure."""

from __future__ import annotations

from rich.text import Text

from homelab.controller.dashboard import view_state
from homelab.controller.dashboard.columns import clip
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.view_state import ViewState

_TALL = 34  # from here on three lines for commands are not missed elsewhere
_LOW = 12  # below it, one line for the keys is enough


def lines(snapshot: Snapshot, width: int, height: int | None, state: ViewState | None) -> list[Text]:
    """The commands, and below them the keys, where there are any (`state` is not None)."""
    keys = [_keys(snapshot, width, state)] if state is not None else []
    return keys if keys and height is not None and height < _LOW else _commands(snapshot, width, height) + keys


def help_lines(width: int) -> list[Text]:
    """What each key does."""
    return [Text(" keys", style="bold"), *(clip(Text.assemble((f"   {key:<9} ", "bold"), does), width) for key, does in view_state.KEYS)]


def _commands(snapshot: Snapshot, width: int, height: int | None) -> list[Text]:
    """Side by side, or below each other so that they can be copied; where lines are dear and the names long, as the
    alternatives of one: homelab status|stop RUN."""
    pieces = [Text.assemble((f" {command.purpose:<7}  ", "dim"), f"{command.command}  ") for command in snapshot.next_commands]
    if sum(len(piece.plain) for piece in pieces) <= width + 2:
        return [clip(Text().join(pieces), width)] if pieces else []
    if height is None or height >= _TALL:
        return [clip(piece, width) if height else piece for piece in pieces]
    parts = [command.command.split(" ", 2) for command in snapshot.next_commands]
    rest = parts[0][-1]
    verbs = "|".join(part[1] for part in parts if part[-1] == rest)
    return [clip(Text.assemble((" next  ", "dim"), f"homelab {verbs} {rest}"), width)]


def _keys(snapshot: Snapshot, width: int, state: ViewState) -> Text:
    """The keys in order of importance, as many as fit. That leaving ends nothing comes first."""
    line = Text(" paused  ", style="yellow") if state.is_paused else Text(" ")
    goes_on = snapshot.state not in ("done", "failed", "stopped") or (bool(snapshot.supervisor) and snapshot.state == "failed")
    pieces = [
        "q leave (the run goes on)" if goes_on else "q leave",
        "h help",
        "p go on" if state.is_paused else "p pause",
        "j k rank",
        "up down log",
    ]
    for number, piece in enumerate(pieces):
        text = piece if not number else f"   {piece}"
        if len(line.plain) + len(text) > width:
            break
        line.append(text, style="dim")
    return clip(line, width)
