"""What a person has chosen to see, and what a key changes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PAGE = 10
KEYS = (
    ("0-9", "the rank whose log is shown"),
    ("j k", "the next rank, the previous one"),
    ("a", "the log of all ranks together"),
    ("up down", "scroll the log by a line (PgUp PgDn: by ten)"),
    ("g G", "the oldest line of the log, the newest"),
    ("p", "pause the picture; the run continues"),
    ("h ?", "this help"),
    ("q", "leave; the run continues (Ctrl-C does the same)"),
)
"""Key -> what it does, as the help shows it."""


@dataclass(frozen=True)
class ViewState:
    """`rank` None: all ranks. `lines_up`: how far the log is scrolled from its newest line."""

    rank: int | None = None
    lines_up: int = 0
    is_paused: bool = False
    is_help: bool = False
    is_left: bool = False


def press(state: ViewState, key: str, ranks: Sequence[int], log_lines: int) -> ViewState:
    """The state after one key (names as of `keys.decoded`). `log_lines`: how many lines the log has. An unknown key changes nothing."""
    if key in ("q", "Q"):
        return replace(state, is_left=True)
    if key in ("h", "H", "?"):
        return replace(state, is_help=not state.is_help)
    if key == "escape":
        return replace(state, is_help=False) if state.is_help else replace(state, rank=None, lines_up=0)
    if key in ("p", "P", " "):
        return replace(state, is_paused=not state.is_paused)
    steps = {
        "up": 1,
        "down": -1,
        "page up": PAGE,
        "page down": -PAGE,
        "g": log_lines,
        "home": log_lines,
        "G": -log_lines,
        "end": -log_lines,
    }
    if key in steps:
        return replace(state, lines_up=min(max(0, log_lines - 1), max(0, state.lines_up + steps[key])))
    return _choose(state, key, ranks)


def _choose(state: ViewState, key: str, ranks: Sequence[int]) -> ViewState:
    """Another rank, of which the newest line is shown. Behind the last one come all ranks together."""
    if key in ("a", "A"):
        return replace(state, rank=None, lines_up=0)
    if len(key) == 1 and key in "0123456789":
        return replace(state, rank=int(key), lines_up=0) if int(key) in ranks else state
    moves = {"j": 1, "right": 1, "k": -1, "left": -1}
    if key not in moves or not ranks:
        return state
    places: list[int | None] = [None, *sorted(ranks)]
    place = places.index(state.rank) if state.rank in places else 0
    return replace(state, rank=places[(place + moves[key]) % len(places)], lines_up=0)
