"""What the newest collective smoke test that passed has left: whether the cluster is still the one that was tested."""

import os

from homelab.node import files, paths

_MOST_BYTES = 1 << 16  # a record has less than a kilobyte


def read(request):
    """Its record, None where there is none that can be read."""
    path = paths.collective_file(request["workdir"])
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            return {"collective": None}
    except OSError:
        return {"collective": None}
    return {"collective": parse(files.read_json(path))}


def parse(record):
    """{"fingerprint", "time", "results"} of what the file holds, None when it is something else."""
    if not isinstance(record, dict) or not isinstance(record.get("fingerprint"), str):
        return None
    kept_at = record.get("time")
    return {
        "fingerprint": record["fingerprint"],
        "time": kept_at if isinstance(kept_at, (int, float)) else None,
        "results": [entry for entry in record.get("results") or [] if isinstance(entry, dict)],
    }
