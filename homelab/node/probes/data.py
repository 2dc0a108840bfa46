"""Data files that must lie on the node already."""

import os

from homelab.node import files


def read(request):
    """Each file by its role, with its digest."""
    return {"data": {role: _data(path) for role, path in (request.get("data") or {}).items()}}


def _data(path):
    path = os.path.expanduser(path)
    answer = {"path": path, "found": False, "size_bytes": None, "sha256": None, "rows": None, "problem": None}
    try:
        digest, rows = files.digest_and_rows(path)
        answer.update(size_bytes=os.path.getsize(path), sha256=digest, rows=rows, found=True)
    except OSError as error:
        answer["problem"] = error.strerror
    return answer
