"""Who acts on a run, as this node sees it: the supervisor that follows it from anywhere, the command that has claimed it, a stop by hand.

Another machine may look at a run whose supervisor it does not have: it asks here. `<run>/supervisor.heard` says who follows, and when the last
word came, by this machine's own clock that runs through sleep. What follows from it is decided in `homelab.controller.run.ownership`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import claims
from homelab.node.system import boot_clock, processes
from homelab.shared.protocol import files
from homelab.shared.protocol.owner_messages import Claimant, Follower, Owner

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.run_requests import FollowRequest

EVERY_S = 2.0  # a word comes every second; a file that often would be too much for an SD card
# A supervisor that has closed its connection opens another one in a second or two; one that is cut off says nothing.
LEFT_S, SILENT_S = 5.0, 30.0
_HEARD = "supervisor.heard"


class Ear:
    """Writes down that the supervisor that asks has spoken. A run whose folder is gone is not brought back."""

    def __init__(self, folder: str, request: FollowRequest) -> None:
        self._path = os.path.join(folder, _HEARD)
        self._who = {"by": request.by, "process": request.process}
        self._at_s = -EVERY_S

    def hear(self) -> None:
        """It has just spoken."""
        if time.monotonic() - self._at_s >= EVERY_S:
            self._at_s = time.monotonic()
            self._write(has_left=False)

    def leave(self) -> None:
        """It has closed the connection."""
        if (files.read_object(self._path) or {}).get("process") == self._who["process"]:
            self._write(has_left=True)

    def _write(self, has_left: bool) -> None:
        with contextlib.suppress(OSError):  # a full disk
            files.replace(self._path, (json.dumps({**self._who, **boot_clock.now(), "has_left": has_left}) + "\n").encode())


def seen(workdir: str, run: str) -> Owner:
    """All of it, for `poll`."""
    return Owner(supervisor=follower(workdir, run), claim=claimant(workdir, run), stopped_attempt=claims.stopped_attempt(workdir, run))


def follower(workdir: str, run: str) -> Follower | None:
    """The supervisor that follows the run, here or elsewhere; None where none was heard lately."""
    entry = files.read_object(os.path.join(paths.run_dir(workdir, run), _HEARD)) or {}
    age_s, has_left = boot_clock.passed_s(entry), entry.get("has_left") is True
    if age_s > (LEFT_S if has_left else SILENT_S):
        return None
    by, process = entry.get("by"), entry.get("process")
    process = process if isinstance(process, dict) else {}
    return Follower(
        by=by if isinstance(by, str) else "", process=process, silent_s=age_s, has_left=has_left, is_dead=_has_died_here(process)
    )


def _has_died_here(process: dict[str, Any]) -> bool:
    """Whether a mark of `homelab.controller.run.process_owner` is of a process of this machine that is gone: other machines cannot tell."""
    here, pid = (boot_clock.boot_id(), processes.namespace()), process.get("pid")
    if not all(here) or (process.get("boot_id"), process.get("namespace")) != here or not isinstance(pid, int):
        return False
    if processes.state(pid):
        return not processes.is_alive(pid)
    try:
        os.kill(pid, 0)  # a mount of /proc with hidepid shows no process of another user (proc(5))
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def claimant(workdir: str, run: str) -> Claimant | None:
    """The command, or the try of a supervisor, that is about to start the run or to go on with it; None where none is."""
    holder = claims.holder(workdir, run)
    return Claimant(by=holder.by, doing=holder.doing, age_s=holder.age_s, process=holder.process) if holder else None


def busy(workdir: str, run: str) -> str:
    """Who is at work on the run, for people; "" for nobody."""
    if claimant(workdir, run):
        return "a command is about to continue it"
    supervisor = follower(workdir, run)
    is_watched = supervisor is not None and not supervisor.is_dead
    return f"its supervisor watches it ({supervisor.by or 'of another machine'})" if supervisor and is_watched else ""
