"""Data files that are not what their name says, recognised by their first bytes: compressed, or text that is not UTF-8.

Sources: RFC 1952 (gzip), 8878 (zstd), APPNOTE.TXT (zip), the xz and bzip2 formats; RFC 4627 section 3 for UTF-16 and UTF-32 without
a mark: the first two characters of JSON, and of nearly every table, are ASCII.
"""

from __future__ import annotations

import shlex
from pathlib import Path

_PACKED = (
    (b"\x1f\x8b", "gzip", ".gz", "gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst", "unzstd"),
    (b"\xfd7zXZ\x00", "xz", ".xz", "unxz"),
    (b"BZh", "bzip2", ".bz2", "bunzip2"),
)
_MARKS = (  # UTF-32 before UTF-16, whose mark begins like it
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
)
_ZEROS = {(0, 0, 0, 1): "UTF-32BE", (1, 0, 0, 0): "UTF-32LE", (0, 1, 0, 1): "UTF-16BE", (1, 0, 1, 0): "UTF-16LE"}


def unmask(path: Path, first: bytes) -> tuple[str, str] | None:
    """(what the file is, the command that fixes it) by its `first` bytes; None where the name is right."""
    file = shlex.quote(str(path))
    for magic, name, suffix, unpack in _PACKED:
        if first.startswith(magic):
            renamed = shlex.quote(f"{path}{suffix}")
            return f"compressed by {name}", f"{unpack} {file}" if path.suffix == suffix else f"mv {file} {renamed} && {unpack} {renamed}"
    if first.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "a zip archive (as spreadsheets are, too)", f"unzip {file}, then name the file from inside it in the recipe"
    if first.startswith(b"PAR1") and path.suffix != ".parquet":
        return "a Parquet file", f"mv {file} {shlex.quote(str(path.with_suffix('.parquet')))}, and name it so in the recipe"
    encoding = next((name for mark, name in _MARKS if first.startswith(mark)), None)
    if encoding is None and len(first) >= 4:
        encoding = _ZEROS.get(tuple(int(byte != 0) for byte in first[:4]))  # type: ignore[arg-type]
    if encoding is None:
        return None
    converted = shlex.quote(str(path.with_name(f"utf8-{path.name}")))
    return f"{encoding} text, not UTF-8", f"iconv -f {encoding} -t UTF-8 {file} > {converted}, and name that file in the recipe"


def half_character(text: str) -> str | None:
    """The first code point of `text` that UTF-8 cannot hold (half of a surrogate pair), as JSON writes it; None where there is none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
