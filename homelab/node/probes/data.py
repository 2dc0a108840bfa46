"""Data files that the node must already have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from homelab.shared.protocol.digest import sha256_and_rows

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """Each file by its role, with its digest."""
    return {role: _data(path) for role, path in (request.get("data") or {}).items()}


def _data(path: str) -> JsonObject:
    path = os.path.expanduser(path)
    answer = {"path": path, "found": False, "size_bytes": None, "sha256": None, "rows": None, "problem": None}
    try:
        digest, rows = sha256_and_rows(path)
        answer.update(size_bytes=os.path.getsize(path), sha256=digest, rows=rows, found=True)
    except OSError as error:
        answer["problem"] = error.strerror
    return answer
