"""Data files that hold no rows, or are not what their name says, by their first bytes: packed, binary, or text that is not UTF-8.

Sources: RFC 1952 (gzip), 8878 (zstd), APPNOTE.TXT (zip), the xz and bzip2 formats; RFC 4627 section 3 for UTF-16 and UTF-32 without
a mark: the first two characters of JSON, and of nearly every table, are ASCII. The others: the list of file signatures of Wikipedia.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
FIRST_BYTES = 512

_PACKED = (
    (b"\x1f\x8b", "gzip", ".gz", "gunzip"),
    (b"\x28\xb5\x2f\xfd", "zstd", ".zst", "unzstd"),
    (b"\xfd7zXZ\x00", "xz", ".xz", "unxz"),
    (b"BZh", "bzip2", ".bz2", "bunzip2"),
)
_ARCHIVES = ((b"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x"), (b"Rar!", "a rar archive", "unrar x"))
_OTHERS = (
    (b"%PDF", "a PDF document"),
    (b"{\\rtf", "an RTF document"),
    (b"\xd0\xcf\x11\xe0", "a document of an old version of Office"),
    (b"\x89PNG", "a picture (PNG)"),
    (b"\xff\xd8\xff", "a picture (JPEG)"),
    (b"GIF8", "a picture (GIF)"),
    (b"II*\x00", "a picture (TIFF)"),
    (b"MM\x00*", "a picture (TIFF)"),
    (b"RIFF", "a sound, a picture or a film (RIFF)"),
    (b"ID3", "a sound (MP3)"),
    (b"OggS", "a sound (Ogg)"),
    (b"fLaC", "a sound (FLAC)"),
    (b"SQLite format 3", "an SQLite database"),
    (b"GGUF", "a model (GGUF)"),
    (b"ARROW1", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
)
_TEXT_OF_IT = "copy its text into a .txt, .csv or .jsonl file, and name that file in the recipe"
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
        return "a zip archive (spreadsheets are zip archives, too)", f"unzip {file}, then name the file from inside it in the recipe"
    if first.startswith(b"PAR1") and path.suffix != ".parquet":
        return "a Parquet file", f"mv {file} {shlex.quote(str(path.with_suffix('.parquet')))}, and name the new file in the recipe"
    for magic, name, unpack in _ARCHIVES:
        if first.startswith(magic):
            return name, f"{unpack} {file}, then name the file from inside it in the recipe"
    if first[257:262] == b"ustar":
        return "a tar archive", f"tar xf {file}, then name the file from inside it in the recipe"
    if first.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS without the data", f"git lfs pull, in the folder of {file}"
    other = next((name for magic, name in _OTHERS if first.startswith(magic)), None)
    if other is not None:
        return other, _TEXT_OF_IT
    if path.suffix == ".parquet":
        return (
            None
            if first.startswith(b"PAR1") or not first
            else ("not a Parquet file, although its name says so", "rename it by its format, or fetch it again")
        )
    encoding = next((name for mark, name in _MARKS if first.startswith(mark)), None)
    if encoding is None and len(first) >= 4:
        encoding = _ZEROS.get(tuple(int(byte != 0) for byte in first[:4]))  # type: ignore[arg-type]
    if encoding is None:
        return ("binary, and no text", _TEXT_OF_IT) if b"\x00" in first else None
    return f"{encoding} text, not UTF-8", converted(path, encoding)


def converted(path: Path, encoding: str, options: str = "") -> str:
    """The command that writes the text of `path` as UTF-8 beside it, and what follows. It runs in every folder, whatever the file is called."""
    target = shlex.quote(str(path.with_name(f"utf8-{path.name}")))
    return f"iconv {options}-f {encoding} -t UTF-8 {shlex.quote(str(path))} > {target}, and name that file in the recipe"


def undecodable(path: Path, lines: Iterable[bytes]) -> tuple[str, int, str]:
    """(what is wrong, in which line from 1, the command that fixes it) of `path`, some of whose `lines` are not UTF-8."""
    first, problem, strays, letters = 0, "", 0, 0
    for number, line in enumerate(lines, start=1):
        kept = line.decode("utf-8", "ignore")
        letters += len(kept) - len(kept.encode("ascii", "ignore"))
        strays += len(line) - len(kept.encode())
        if strays and not first:
            try:
                line.decode()
            except UnicodeDecodeError as error:
                first, problem = number, f"{error.reason} at byte {error.start + 1} of the line"
    if letters > strays:  # as another encoding, each of these letters would become two wrong ones
        return f"a part of the file is not UTF-8: {problem}", first, f"leave such bytes out: {converted(path, 'UTF-8', '-c ')}"
    other = "text of another language has its own name for -f, like GB18030 or SHIFT_JIS"
    return f"the file is not UTF-8: {problem}", first, f"{converted(path, 'WINDOWS-1252')}; {other}"


def half_character(text: str) -> str | None:
    """The first code point of `text` that UTF-8 cannot hold (half of a surrogate pair), as JSON writes it; None where there is none."""
    if text.isascii():
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None
