"""Digests of large files, cheap enough for every preflight: samples of the content, and full digests that are cached until the file changes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256, sampled, sha256_and_rows

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

SMALL_BYTES = 32 << 20  # up to this size a file is read completely: a tokenizer has 2 to 34 MB
_KEPT_AT_MOST = 5000
_DIGEST = re.compile("[0-9a-f]{64}")


class Kept:
    """Full digests, kept in `<workdir>/digests.json` by path for as long as size, time of change and inode are the same."""

    def __init__(self, workdir: str, limit_s: float = 60.0) -> None:
        self._path = os.path.join(paths.expand(workdir), "digests.json")
        self._known = files.read_object(self._path) or {}
        self._changed = False
        self._until = time.monotonic() + limit_s

    def of(self, path: str, deep: bool = False) -> JsonObject:
        """One file: {"size_bytes", "sampled", "sha256", "blob"}.

        Small files have "sha256" alone; larger ones "sampled", and "sha256" where it is kept, or `deep` asks for it and there is time.
        "blob" is the sha256 that the hub's cache gave the file as its name when it was downloaded.
        """
        path = os.path.realpath(path)
        state = os.stat(path)
        mark = _mark(state)
        kept = self._entry(path, mark).get("sha256")
        small = state.st_size <= SMALL_BYTES
        if kept is None and (small or deep) and time.monotonic() < self._until:
            kept = file_sha256(path)
            self._known[path] = {"mark": mark, "sha256": kept}
            self._changed = True
        name = os.path.basename(path)
        return {
            "size_bytes": state.st_size,
            "sampled": None if small else sampled(path, state.st_size),
            "sha256": kept,
            "blob": name if _DIGEST.fullmatch(name) else None,
        }

    def with_rows(self, path: str) -> tuple[str, int | None]:
        """(sha256, rows) of a file of data, as `sha256_and_rows` gives them. What is not kept is read, however long that takes. Raises OSError.

        The rows depend on the file's name, so a link keeps its own.
        """
        mark = _mark(os.stat(path))
        entry = self._entry(path, mark)
        rows = entry.get("rows", "")
        if entry and (rows is None or (isinstance(rows, int) and rows > 0)):
            return entry["sha256"], rows
        digest, rows = sha256_and_rows(path)
        if mark[0] > SMALL_BYTES:
            self._known[path] = {"mark": mark, "sha256": digest, "rows": rows}
            self._changed = True
        return digest, rows

    def _entry(self, path: str, mark: list[int]) -> JsonObject:
        """What is kept of a file that has this mark; nothing where that is damaged."""
        entry = self._known.get(path)
        if not isinstance(entry, dict) or entry.get("mark") != mark:
            return {}
        return entry if isinstance(entry.get("sha256"), str) and _DIGEST.fullmatch(entry["sha256"]) else {}

    def save(self) -> None:
        """Write the new digests. When the workdir cannot be written, the next call takes longer."""
        if not self._changed:
            return
        while len(self._known) > _KEPT_AT_MOST:
            del self._known[next(iter(self._known))]
        with contextlib.suppress(OSError):
            files.write_json(self._path, self._known)


def _mark(state: os.stat_result) -> list[int]:
    return [state.st_size, state.st_mtime_ns, state.st_ino]
