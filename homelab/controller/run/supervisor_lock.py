"""The lock of a run's supervisor: at most one on this machine, and none is left behind by a process that dies.

It is two: a file in the run's folder, and one beside all runs (`~/.local/state/homelab/locks`), named after that folder. Somebody may delete the folder
while a supervisor is at work; a new file there is another lock, and the second one still has its holder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import lock

_ASKED_S = 0.2  # who only asks holds it for some microseconds (`homelab.shared.protocol.lock.is_held`)


@contextmanager
def held(paths: RunPaths) -> Iterator[bool]:
    """True when the lock is ours inside the block, False when somebody else has it. The kernel drops it with its holder.

    A holder keeps its lock when the run's folder is deleted.

    Raises HomelabError where there cannot be one.
    """
    file = paths.supervisor_lock
    try:
        # Not blocking, because the file may be a named pipe.
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise HomelabError(
            f"the lock of this run cannot be taken: {error.strerror}", where=str(file), hint=store.disk_error_hint(file, error)
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        with _held_beside(paths) as is_ours:
            yield is_ours
    finally:
        os.close(descriptor)


def is_held(paths: RunPaths) -> bool:
    """Whether a process supervises this run on this machine."""
    return lock.is_held(paths.supervisor_lock) or lock.is_held(_beside(paths))


def _beside(paths: RunPaths) -> Path:
    """The second lock: homes may be shared by several machines, and the folders of runs are each machine's own."""
    place = f"{socket.gethostname()}:{os.path.realpath(paths.root)}"
    state = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return state / "homelab" / "locks" / f"{hashlib.sha256(os.fsencode(place)).hexdigest()[:32]}.lock"


@contextmanager
def _held_beside(paths: RunPaths) -> Iterator[bool]:
    """The same for the second lock; True where there can be none (a home that cannot be written)."""
    file = _beside(paths)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _locked(file)
    except OSError:
        yield True
        return
    if descriptor is None:
        yield False
        return
    try:
        yield True
    finally:
        with suppress(OSError):
            os.unlink(file)
        os.close(descriptor)


def _locked(file: Path) -> int | None:
    """The open file, locked; None where somebody else keeps it. Raises OSError."""
    deadline = time.monotonic() + _ASKED_S
    while time.monotonic() < deadline:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):  # else its holder has just taken it away
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        time.sleep(0.01)
    return None
