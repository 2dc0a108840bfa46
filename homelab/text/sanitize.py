"""Words from elsewhere (a node, a file, the command line), before a terminal gets them: nothing in them that it would obey, and no secret."""

from __future__ import annotations

import re

from homelab.text import secrets

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """One line without escape sequences, control characters and secrets that are known here; tabs become spaces."""
    text = _ESCAPES.sub("", text).rstrip("\r\n")
    text = text[text.rfind("\r") + 1 :]
    return secrets.hide(_CONTROLS.sub("", text.expandtabs(4)).rstrip())


def plain_text(text: str) -> str:
    """Like `plain`, for a text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def plain_piece(text: str) -> str:
    """Like `plain_text`, for a piece out of the middle of a text: spaces at its ends stay."""
    return "\n".join(secrets.hide(_CONTROLS.sub("", line.expandtabs(4))) for line in _ESCAPES.sub("", text).split("\n"))


def plain_lines(text: str) -> str:
    """The same without what is empty around it."""
    return plain_text(text).strip()


def shortened(text: str, most: int = 2000) -> str:
    """With lines that are longer than anybody reads cut."""
    return "\n".join(line if len(line) <= most else f"{line[:most]}…" for line in text.split("\n"))


def plain_name(text: str, most: int = 100) -> str:
    """A name that nobody knows, to be said in an error: one line, and not longer than a line."""
    return shortened(plain(" ".join(text[: 10 * most].splitlines())), most)
