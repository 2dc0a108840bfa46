"""What a terminal sends when a key is pressed, as names of keys. Pure."""

from __future__ import annotations

_NAMES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[5~": "page up", "[6~": "page down", "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end",
    "[7~": "home", "[8~": "end",
}  # fmt: skip
_LONGEST = 16  # characters of a sequence; a longer one is none


def decoded(text: str, *, is_all: bool = False) -> tuple[list[str], str]:
    """(keys, what is left): a printable character is its own name; "up", "page down", "escape", ... have one. Unknown sequences are left out.

    An escape sequence may come in two parts, over SSH: its beginning is left for the next call, unless `is_all` says that nothing follows.
    """
    keys: list[str] = []
    place = 0
    while place < len(text):
        if text[place] != "\x1b":
            if text[place].isprintable():
                keys.append(text[place])
            place += 1
            continue
        end = _end(text, place)
        if end is None and not is_all:
            return keys, text[place:]
        if end is None or end == place + 1:
            keys.append("escape")
            place += 1
            continue
        name = _NAMES.get(text[place + 1 : end])
        keys += [name] if name else []
        place = end
    return keys, ""


def _end(text: str, start: int) -> int | None:
    """Where the sequence that begins at `start` ends; `start` + 1 for an escape alone; None where more may come."""
    rest = text[start + 1 : start + 1 + _LONGEST]
    if not rest:
        return None
    if rest[0] not in "[O":
        return start + 1
    if rest[0] == "O":
        return start + 3 if len(rest) > 1 else None
    for number, character in enumerate(rest[1:], 1):
        if "@" <= character <= "~":
            return start + 2 + number
    return None if len(rest) < _LONGEST else start + 1 + len(rest)
