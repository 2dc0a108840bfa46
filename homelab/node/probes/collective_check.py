"""The record of the newest collective smoke test that passed: it shows whether the cluster is still the one that was tested."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_MOST_BYTES = 1 << 16  # a record has less than a kilobyte


def read(request: JsonObject) -> JsonObject | None:
    """Its record, None where there is none that can be read."""
    path = paths.collective_file(request["workdir"])
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            return None
    except OSError:
        return None
    return parse(files.read_json(path))


def parse(record: Any) -> JsonObject | None:
    """{"fingerprint", "time", "results"} of what the file holds, None when it is something else."""
    if not isinstance(record, dict) or not isinstance(record.get("fingerprint"), str):
        return None
    kept_at = record.get("time")
    return {
        "fingerprint": record["fingerprint"],
        "time": kept_at if isinstance(kept_at, (int, float)) else None,
        "results": [entry for entry in record.get("results") or [] if isinstance(entry, dict)],
    }
