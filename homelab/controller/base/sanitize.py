"""Words from elsewhere (a node, a file, the command line), before a terminal gets them: nothing in them that it would obey, nothing that
cannot be seen or that turns the order of what is read, and no secret."""

from __future__ import annotations

import re

from homelab.controller.base import secrets

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# Letters without a picture, and those that turn the order of reading: Unicode's bidi controls (UAX #9), its Default_Ignorable_Code_Point
# (DerivedCoreProperties), tags, the blank letter of Braille, and what stands for no character. U+FE0E and U+FE0F choose the look of the sign
# before them; the joiners U+200C and U+200D belong between signs of one picture and between letters of the scripts that join.
_NAMELESS = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0d\ufeff\uffa0\ufff0-\ufffb"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_PICTURES = (
    "\u00a9\u00ae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u27bf\u2934-\u2935\u2b00-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_JOINED = "\u0600-\u109f\u1780-\u18af\ua840-\uabff"  # from Arabic to Myanmar, Khmer, Mongolian, and what came to them later
_UNSEEN = re.compile(
    rf"[{_NAMELESS}]|(?<![#*0-9{_PICTURES}])[\ufe0e\ufe0f]|(?<![{_PICTURES}\ufe0f{_JOINED}])[\u200c\u200d]|[\u200c\u200d](?![{_PICTURES}{_JOINED}])"
)
_LINE_ENDS = re.compile("[\u2028\u2029]")
_FOR_JSON = re.compile(f"[\x7f-\x9f\u2028\u2029{_NAMELESS}\ud800-\udfff]")


def _harmless(text: str) -> str:
    """A line without control characters and letters that nobody sees."""
    text = _CONTROLS.sub("", text)
    return text if text.isascii() else _UNSEEN.sub("", _LINE_ENDS.sub(" ", text))


def plain(text: str) -> str:
    """One line without escape sequences, control characters, unseen letters and secrets that are known here; tabs become spaces."""
    text = _ESCAPES.sub("", text).rstrip("\r\n")
    text = text[text.rfind("\r") + 1 :]
    return secrets.hide(_harmless(text.expandtabs(4)).rstrip())


def plain_text(text: str) -> str:
    """Like `plain`, for a text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n"))


def plain_piece(text: str) -> str:
    """Like `plain_text`, for a piece out of the middle of a text: spaces at its ends stay."""
    return "\n".join(secrets.hide(_harmless(line.expandtabs(4))) for line in _ESCAPES.sub("", text).split("\n"))


def plain_json(document: str) -> str:
    """The same document (`json.dumps`), in which what a terminal would obey or nobody sees is written as `\\uXXXX`: a program reads it as it was."""
    return _FOR_JSON.sub(_escaped, document)


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def plain_lines(text: str) -> str:
    """The same without what is empty around it."""
    return plain_text(text).strip()


def shortened(text: str, most: int = 2000) -> str:
    """With lines that are longer than anybody reads cut."""
    return "\n".join(line if len(line) <= most else f"{line[:most]}…" for line in text.split("\n"))


def plain_name(text: str, most: int = 100) -> str:
    """A name that nobody knows, to be said in an error: one line, and not longer than a line."""
    return shortened(plain(" ".join(text[: 10 * most].splitlines())), most)
