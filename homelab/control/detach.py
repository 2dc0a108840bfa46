"""Starting a run's supervisor: a process of its own that outlives this terminal."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from homelab.errors import HomelabError
from homelab.runs import lock
from homelab.runs.paths import RunPaths

_START_S = 10.0


def start(paths: RunPaths, cluster_file: Path, nodes: Collection[str]) -> None:
    """Start the supervisor of a run on `nodes`, which are those it may use, unless it has one.

    Raises HomelabError when it does not come up; the run itself goes on.
    """
    if lock.is_held(paths):
        return
    command = [
        sys.executable, "-m", "homelab", "supervise", paths.name,
        "--nodes", ",".join(nodes), "--cluster", str(cluster_file.resolve()), "--runs-dir", str(paths.root.parent.resolve()),
    ]  # fmt: skip
    try:
        with paths.supervisor_log.open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=paths.root)
    except OSError as error:
        raise _not_started(paths, str(error)) from error
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if lock.is_held(paths):
            return
        time.sleep(0.05)
    if process.poll() == 0:  # it found nothing to do, or another one was quicker
        return
    said = paths.supervisor_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise _not_started(paths, said[0] if said else f"no answer within {_START_S:.0f} s")


def _not_started(paths: RunPaths, why: str) -> HomelabError:
    return HomelabError(
        f"the supervisor did not start: {why}",
        where=str(paths.supervisor_log),
        hint=f"the run goes on without it; by hand: homelab supervise {paths.name}, and after a failure: homelab recover {paths.name}",
    )
