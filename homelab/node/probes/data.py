"""Data files that the node must already have."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from homelab.node.storage import digests

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def read(request: JsonObject) -> JsonObject:
    """Each file by its role, with its digest. That of a large file is kept until the file changes."""
    named = request.get("data") or {}
    if not named:
        return {}
    kept = digests.Kept(request["workdir"])
    found = {role: _data(path, kept) for role, path in named.items()}
    kept.save()
    return found


def _data(path: str, kept: digests.Kept) -> JsonObject:
    path = os.path.expanduser(path)
    answer = {"path": path, "found": False, "size_bytes": None, "sha256": None, "rows": None, "problem": None}
    try:
        digest, rows = kept.with_rows(path)
        answer.update(size_bytes=os.path.getsize(path), sha256=digest, rows=rows, found=True)
    except OSError as error:
        answer["problem"] = error.strerror
    return answer
