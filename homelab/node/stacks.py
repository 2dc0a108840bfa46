"""Where each rank of this node stands: the workers write the stacks of their threads when they get SIGUSR1 (`homelab.worker.train`)."""

import os
import signal
import time

from homelab.node import files, paths

_WAIT_S = 1.0
_LINES = 200


def stacks(request):
    """{"ranks": {rank: [lines]}} of the newest attempt; no lines for a rank that cannot answer (frozen, or gone)."""
    folder = paths.run_dir(request["workdir"], request["run"])
    attempt = (paths.attempts(folder) or [0])[-1]
    plan = files.read_json(os.path.join(paths.attempt_dir(folder, attempt), "plan.json")) or {}
    asked = {}
    for rank in plan.get("ranks", []):
        home = os.path.join(paths.attempt_dir(folder, attempt), "ranks", str(rank["rank"]))
        file = os.path.join(home, "stacks.txt")
        beat = files.read_json(os.path.join(home, "heartbeat.json")) or {}
        # Only a worker that has made the file handles the signal: it would end any other program.
        if rank["node"] == request["node"] and isinstance(beat.get("pid"), int) and os.path.exists(file):
            asked[str(rank["rank"])] = (file, os.path.getsize(file))
            try:
                os.kill(beat["pid"], signal.SIGUSR1)
            except OSError:
                continue
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and any(os.path.getsize(file) <= before for file, before in asked.values()):
        time.sleep(0.02)
    return {"ranks": {rank: files.tail(file, _LINES) if os.path.getsize(file) > before else [] for rank, (file, before) in asked.items()}}
