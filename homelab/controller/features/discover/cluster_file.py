"""The file of a cluster as bytes: read, and replaced in one act."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config import load
from homelab.shared.protocol import files

_MARK = b"\xef\xbb\xbf"  # some editors begin a file with a byte order mark


@dataclass(frozen=True)
class Before:
    """A file as it was read; `text` is without a byte order mark."""

    content: bytes
    text: str
    mode: int


def read(path: Path) -> Before | None:
    """The file, None where there is none. Raises InputError where it cannot be read as a cluster."""
    if not path.exists():
        return None
    load.load_cluster(path)  # one error with all its faults
    content = path.read_bytes()
    return Before(content, content.removeprefix(_MARK).decode(), path.stat().st_mode & 0o777)


def replace(path: Path, before: Before | None, text: str) -> None:
    """Write the file. Raises HomelabError where somebody has changed it since it was read, or the disk refuses."""
    now = path.read_bytes() if path.exists() else None
    if now != (before.content if before else None):
        raise HomelabError(
            "this file was changed meanwhile, so nothing was written", where=str(path), hint=Hint("run it again: {}", homelab("init"))
        )
    mark = _MARK if before is not None and before.content.startswith(_MARK) else b""
    target = path.resolve()  # of a link, the file itself
    try:
        files.write_atomic(target, mark + text.encode(), before.mode if before else 0o644)
    except OSError as error:
        raise InputError(
            f"this file cannot be written: {error.strerror}", where=str(path), hint=f"ls -ld {shlex.quote(str(target.parent))}"
        ) from error
