"""sha256 of files: of all of a file, read once and in blocks, or of samples of a large one."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from homelab.shared.protocol.data_rows import BLANK_LINE

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.files import AnyPath

_BLOCK_BYTES = 1 << 20
_ENDS_BYTES = 1 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 16


def file_sha256(path: AnyPath) -> str:
    """Hex digest of a file's content. Raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(_BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()


def sha256_and_rows(path: AnyPath) -> tuple[str, int | None]:
    """(hex digest of a file, its rows of training data), read once. Raises OSError.

    Rows are lines (.jsonl), lines after the header (.csv) or paragraphs (.txt). Of the first two, line breaks are counted, so empty
    lines and breaks inside of quotes make a difference of a few rows. None for kinds whose rows only a parser can count.
    """
    digest = hashlib.sha256()
    suffix = os.path.splitext(path)[1].lower()
    lines = paragraphs = 0
    last, space = b"\n", b""
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(_BLOCK_BYTES), b""):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
            if suffix == ".txt":  # space at the end of a block may be half of a blank line
                text = space + block
                words = text.rstrip()
                space = b"\n\n" if BLANK_LINE.search(text, len(words)) else text[len(words) :]
                paragraphs += len(BLANK_LINE.findall(words if paragraphs else words.lstrip())) + (bool(words) and not paragraphs)
    lines += last != b"\n"
    rows = {".jsonl": lines, ".csv": lines - 1, ".txt": paragraphs}.get(suffix)
    return digest.hexdigest(), None if rows is None or rows < 1 else rows


def sampled(path: str, size_bytes: int) -> str:
    """Hex digest of a file's size, its first and last MB and 16 blocks of 64 KB spread evenly between them: 3 MB of reading."""
    digest = hashlib.sha256(b"%d\0" % size_bytes)
    step = (size_bytes - 2 * _ENDS_BYTES) // (_SAMPLES + 1)
    places = [_ENDS_BYTES + number * step for number in range(1, _SAMPLES + 1)] if step > _SAMPLE_BYTES else []
    with open(path, "rb", buffering=0) as stream:
        for start, count in [(0, _ENDS_BYTES)] + [(place, _SAMPLE_BYTES) for place in places]:
            digest.update(_read(stream, start, count))
        digest.update(_read(stream, max(0, size_bytes - _ENDS_BYTES), _ENDS_BYTES))
    return digest.hexdigest()


def _read(stream: BinaryIO, start: int, count: int) -> bytes:
    stream.seek(start)
    return stream.read(count)
