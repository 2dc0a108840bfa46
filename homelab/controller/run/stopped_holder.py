"""The process of this machine that holds a run and is stopped by a signal (SIGSTOP, Ctrl-Z): its lock stays, and nobody else may act."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.run import process_owner, store, supervisor_lock
from homelab.controller.run.paths import RunPaths

_WHO = {"recovering by hand": "homelab recover", "launching": "homelab launch"}


@dataclass(frozen=True)
class StoppedHolder:
    """`who`: the supervisor, or the command that acts in its place."""

    who: str
    pid: int

    @property
    def is_stopped(self) -> str:
        """That it is, as a sentence without an end."""
        return f"{self.who}, process {self.pid} on this machine, is stopped (SIGSTOP or Ctrl-Z)"

    @property
    def go_on(self) -> str:
        """The command that lets it go on."""
        return f"kill -CONT {self.pid}"


def here(paths: RunPaths) -> StoppedHolder | None:
    """None where nobody holds the run on this machine, or its holder is at work."""
    if not supervisor_lock.is_held(paths):
        return None
    record = store.read_object(paths.supervisor_json)
    pid = record.get("pid")
    if not isinstance(pid, int) or not process_owner.is_stopped(pid):
        return None
    return StoppedHolder(_WHO.get(str(record.get("doing")), "the supervisor"), pid)
