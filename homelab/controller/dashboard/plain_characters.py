"""The picture for terminals that know ASCII alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rich.cells import cell_len
from rich.text import Text

# Each sign is one cell wide, so that every column keeps its place.
_SIGNS = str.maketrans("▁▂▃▄▅▆▇█▉▊▋▌▍▎▏░━┄─·●○■✓✗…–→°│┤◆\u202f’“”", '_.:-=+*#####---.=.--*o#vx~-> |+o,\'""')
_BRAILLE = range(0x2801, 0x2900)


def has_unicode(encoding: str, environment: Mapping[str, str]) -> bool:
    """Whether the terminal shows more than ASCII: by the encoding of the output and by what its owner says (LC_ALL, LC_CTYPE, LANG).

    Python itself sets LC_CTYPE=C.UTF-8 where it finds the locale C, so that this value alone says nothing.
    """
    if not encoding.lower().replace("-", "").startswith("utf"):
        return False
    by_python = environment.get("LC_CTYPE") in ("C.UTF-8", "C.utf8", "UTF-8") and environment.get("LANG") in ("C", "POSIX")
    names = ("LC_ALL", "LANG") if by_python else ("LC_ALL", "LC_CTYPE", "LANG")
    return next((environment[name] for name in names if environment.get(name)), "") not in ("C", "POSIX")


def ascii_line(line: Text) -> Text:
    """The same line, as wide, in ASCII with its styles; a character without an equal is '?'."""
    if line.plain.isascii():
        return line
    # A character may be two cells wide or none, so that spans are kept only where it changes nothing.
    plain = "".join(_ascii(character) for character in line.plain.replace("10⁸", "1e8"))
    return Text(plain, style=line.style, spans=list(line.spans) if len(plain) == len(line.plain) else [])


def _ascii(character: str) -> str:
    if character.isascii():
        return character
    if ord(character) in _BRAILLE:
        return "*"
    sign = character.translate(_SIGNS)
    return sign if sign.isascii() else "?" * cell_len(character)
