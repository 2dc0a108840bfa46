"""The lock of a file that another process of this machine keeps for longer than it may: who that is, and the command that helps."""

from __future__ import annotations

import shlex
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.run import process_owner
from homelab.shared.protocol import lock


def error(what: str, file: Path, descriptor: int, limit_s: float) -> HomelabError:
    """`what` the lock of this open file guards. A process that is stopped by a signal is to go on; another one is to be looked at."""
    pid = lock.holder(descriptor)
    if pid is None:
        return HomelabError(
            f"another process has kept {what} locked for {limit_s:.0f} s", where=str(file),
            hint=Hint("see which one, and end it: {}", f"fuser {shlex.quote(str(file))}"),
        )  # fmt: skip
    if process_owner.is_stopped(pid):
        return HomelabError(
            f"process {pid} is stopped (SIGSTOP or Ctrl-Z) and keeps {what} locked", where=str(file),
            hint=Hint("let it go on: {}; or end it: {}", f"kill -CONT {pid}", f"kill -KILL {pid}"),
        )  # fmt: skip
    return HomelabError(
        f"process {pid} has kept {what} locked for {limit_s:.0f} s", where=str(file),
        hint=Hint("see what it does: {}; to end it: {}", f"ps -fp {pid}", f"kill {pid}"),
    )  # fmt: skip
