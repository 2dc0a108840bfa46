"""When a part of a benchmark ends before its time: what its run says of itself, and nothing of it is left running."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from benchmarks.uneven.meter import started_by_us

from homelab.controller.base.errors import HomelabError
from homelab.controller.run import event_log
from homelab.controller.run.paths import RunPaths
from homelab.lab import procfs

_LAST = 30  # events, and lines of the supervisor's log
_GRACE_S = 5.0


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, `kill` or a closed terminal; with the exit code that says which."""


def interrupted(number: int, _: object) -> None:
    """A handler for these signals."""
    raise Interrupted(128 + number)


def story(paths: RunPaths) -> str:
    """The run's own events and the end of its supervisor's log, as the controller has them. Empty where it has none."""
    lines = [
        f"  {time.strftime('%H:%M:%S', time.localtime(event['time']))}  {event.get('what')}" for event in event_log.lines(paths)[-_LAST:]
    ]
    log: list[str] = []
    with contextlib.suppress(OSError):
        log = paths.supervisor_log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST:]
    event_lines = [f"== events of {paths.name}", *lines] if lines else []
    return "\n".join([*event_lines, *([f"== {paths.supervisor_log}", *(f"  {line}" for line in log)] if log else [])])


def end_all(cluster_file: Path) -> None:
    """End every process of homelab that was started for this cluster. A supervisor whose nodes are gone would wait for them.

    Raises HomelabError when one of them does not end.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        procfs.send(started_by_us(cluster_file), number)
        if procfs.until(lambda: not started_by_us(cluster_file), _GRACE_S):
            return
    left = sorted(started_by_us(cluster_file))
    raise HomelabError(
        f"processes of the benchmark do not end: {left}", where="this machine", hint=f"kill -KILL {' '.join(map(str, left))}"
    )
