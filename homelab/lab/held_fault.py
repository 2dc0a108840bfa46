"""The misconfiguration that a lab has now. A process of its own holds it, and undoes it when it is told to end.

One at a time: several would undo each other's changes in the wrong order. `fault.json` in the lab's folder says which it is;
the process writes it before it changes anything, and removes it after all is undone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.hint import Command, Hint, chain, homelab
from homelab.lab import procfs
from homelab.shared.protocol import files

RECORD_FILE, LOG_FILE = "fault.json", "fault.log"
HOLDER = "homelab.lab.misconfigurations.holder"
START_TIMEOUT_S, UNDO_TIMEOUT_S = 120.0, 60.0


@dataclass(frozen=True)
class HeldFault:
    """Which misconfiguration is in which node, and the process that holds it."""

    name: str
    node: str
    pid: int

    def is_held(self) -> bool:
        """False when the process is gone: then nothing undoes it any more."""
        return procfs.read(self.pid) is not None and HOLDER in procfs.command_line(self.pid)


def read(folder: Path) -> HeldFault | None:
    """The one that the lab has now; None without one. A damaged record reads as one that no process holds."""
    try:
        return HeldFault(**json.loads((folder / RECORD_FILE).read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError):
        return HeldFault("?", "?", 0)


def claim(folder: Path, name: str, node: str) -> None:
    """Write the record for this process. Raises InputError when the lab has a fault already."""
    try:
        with (folder / RECORD_FILE).open("x") as stream:
            json.dump(asdict(HeldFault(name, node, os.getpid())), stream)
    except FileExistsError:
        active = read(folder)
        raise InputError(
            f"{active.node} has {active.name} already, and a lab has one of these faults at a time"
            if active
            else "another fault was just there",
            where=str(folder),
            hint=f"undo it first: {undo_command(folder, active)}" if active else "try again",
        ) from None


def release(folder: Path) -> None:
    """Remove the record."""
    (folder / RECORD_FILE).unlink(missing_ok=True)


def start(folder: Path, node: str, name: str) -> str:
    """Start the process that injects it; returns when it is there: the rest of the command line for `homelab preflight`.

    Raises the error of the process, of the same class, when it cannot be injected; then nothing is left of it.
    """
    command = [sys.executable, "-P", "-m", HOLDER, str(folder), node, name]
    with (folder / LOG_FILE).open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        if not select.select([process.stdout], [], [], START_TIMEOUT_S)[0]:
            raise HomelabError(
                f"{name} was not injected within {START_TIMEOUT_S:.0f} s", where=node, hint=f"read {folder / LOG_FILE}, then try again"
            )
        line = process.stdout.readline()
    except BaseException:
        process.send_signal(signal.SIGTERM)
        process.wait(UNDO_TIMEOUT_S)
        raise
    finally:
        process.stdout.close()
    try:
        answer = json.loads(line)
    except ValueError:
        process.wait(UNDO_TIMEOUT_S)
        raise HomelabError(f"{name} could not be injected: {_last_words(folder)}", where=node, hint=f"read {folder / LOG_FILE}") from None
    if "error" in answer:
        process.wait(UNDO_TIMEOUT_S)
        kind = InputError if answer["is_input"] else HomelabError
        raise kind(answer["error"], where=answer["where"], hint=answer["hint"])
    return str(answer["preflight"])


def undo(folder: Path, node: str, name: str) -> None:
    """Undo it; returns when that is done. Raises InputError when the lab does not have it, HomelabError when it cannot be undone."""
    active = read(folder)
    if active is None:
        raise InputError(f"{node} does not have {name}", where=str(folder), hint=homelab("lab status", str(folder)))
    if active.is_held() and (active.node, active.name) != (node, name):
        raise InputError(
            f"{node} does not have {name}; {active.node} has {active.name}", where=str(folder), hint=undo_command(folder, active)
        )
    why = "the process that held it is gone"
    if active.is_held():
        procfs.send([active.pid], signal.SIGTERM)
        if not procfs.until(lambda: not active.is_held(), UNDO_TIMEOUT_S):
            why = f"process {active.pid} was told to undo it, and has not within {UNDO_TIMEOUT_S:.0f} s"
    if read(folder) is not None:
        raise HomelabError(
            f"{active.name} on {active.node} cannot be undone: {_last_words(folder) or why}",
            where=str(folder),
            hint=Hint("start the lab anew: {}", chain(homelab("lab down", str(folder)), homelab("lab up", str(folder)))),
        )
    (folder / LOG_FILE).unlink(missing_ok=True)


def end(folder: Path) -> None:
    """For a lab that is taken down: undo it where that is possible, and remove record and log."""
    active = read(folder)
    if active and active.is_held():
        procfs.send([active.pid], signal.SIGTERM)
        if not procfs.until(lambda: not active.is_held(), UNDO_TIMEOUT_S):
            procfs.send([active.pid], signal.SIGKILL)
    for name in (RECORD_FILE, LOG_FILE):
        (folder / name).unlink(missing_ok=True)


def undo_command(folder: Path, active: HeldFault) -> Command:
    """What a person types to undo it."""
    return homelab("lab fault", str(folder), active.node, active.name, "--undo")


def _last_words(folder: Path) -> str:
    return files.text(folder / LOG_FILE).rpartition("\n")[2]
