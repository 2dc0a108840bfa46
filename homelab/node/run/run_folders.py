"""The folders of runs that are over: how large they are on this node, and their removal."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import claims, ownership, secret_files, supervisor_host
from homelab.node.storage import results
from homelab.node.system import processes
from homelab.shared.protocol import layout, manifest
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.result_messages import RunFolder, RunFolders

if TYPE_CHECKING:
    from homelab.shared.protocol.request import Request, RunRequest

_REMOVED = ".removed-"  # no name of a run begins so: a removal that was cut off is finished by the next one


def weigh(request: Request) -> RunFolders:
    """Run -> what of it is on this disk, and who is at work on it."""
    root = os.path.join(paths.expand(request.workdir), layout.RUNS)
    alive = processes.of_runs(request.workdir, request.node)
    known: dict[str, RunFolder] = {}
    for name in sorted(os.listdir(root) if os.path.isdir(root) else []):
        folder = os.path.join(root, name)
        if layout.is_usable(name) and os.path.isfile(os.path.join(folder, layout.RUN_JSON)):
            step = max(manifest.steps(folder), default=0)
            busy = busy_with(request.workdir, name, alive)
            known[name] = RunFolder(bytes=_bytes_in(folder), result=results.kind(folder), step=step, busy=busy)
    return RunFolders(runs=known)


def _bytes_in(folder: str) -> int:
    """What its removal frees: a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(place, name))
            except OSError:  # removed meanwhile
                continue
            sizes[(status.st_dev, status.st_ino)] = status.st_blocks * 512
    return sum(sizes.values())


def busy_with(workdir: str, run: str, alive: dict[str, list[int]]) -> str:
    """Who is at work on the run, for people; "" for nobody. `alive`: the processes of runs, by run."""
    if alive.get(run):
        return "it is running on this node"
    supervisor = supervisor_host.state(workdir, run)
    if supervisor is not None and supervisor.alive:
        return "its supervisor is working on this node"
    return ownership.busy(workdir, run)


def remove(request: RunRequest) -> Done:
    """Remove a run's folders from this node. Idempotent. Raises Refusal for a run that somebody is at work on."""
    workdir, run = request.workdir, request.run
    folder = paths.run_dir(workdir, run)
    with claims.locked(workdir):  # nobody starts it meanwhile
        busy = busy_with(workdir, run, processes.of_runs(workdir, request.node))
        if busy:
            raise Refusal(f"{run} is not removed: {busy}", where=folder, hint=f"homelab stop {run}")
        secret_files.remove(folder)
        for place in (folder, paths.supervised_dir(workdir, run)):
            if os.path.lexists(place):
                os.rename(place, _free_name(place))
    for root in {os.path.dirname(folder), os.path.dirname(paths.supervised_dir(workdir, run))}:
        for name in os.listdir(root) if os.path.isdir(root) else []:
            if name.startswith(_REMOVED):
                shutil.rmtree(os.path.join(root, name), ignore_errors=True)
    return Done()


def _free_name(place: str) -> str:
    beside = os.path.join(os.path.dirname(place), _REMOVED + os.path.basename(place))
    number = 0
    while os.path.lexists(f"{beside}-{number}"):
        number += 1
    return f"{beside}-{number}"
