"""A run's supervisor on this node (`homelab launch --supervise head`): what it needs, whether it is at work, its start and its end.

It is the controller's own program, shipped into a code folder of its own; here are only the questions about it. All of it lies in
`<workdir>/supervised/<run>/`: cluster.toml as this node sees the others, their host keys, and `runs/<run>/` like a controller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import ownership
from homelab.node.storage import transfer
from homelab.node.system import processes, programs
from homelab.shared.protocol import files, layout, lock, message
from homelab.shared.protocol.errors import Refusal
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.run_messages import SupervisorLook, SupervisorReply
from homelab.shared.protocol.supervisor_messages import SupervisorEnded, SupervisorNeeds, SupervisorReach, SupervisorStarted

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.request import RunRequest
    from homelab.shared.protocol.supervisor_messages import EndRequest, NeedsRequest, PlaceRequest

_EVENTS = 50  # the newest events; a reader that asks too seldom misses older ones
_START_S = 30.0  # imports are slow on a node that trains on all its cores
_TRY_S = 60.0
_MOST_COPIED_BYTES = 64 << 20


def needs(request: NeedsRequest) -> SupervisorNeeds:
    """This Python, and the versions of those of `packages` (names of distributions) that it has."""
    import importlib.metadata  # here, and tarfile below: `poll` asks this module often, and only for `state`

    versions = {}
    for name in request.packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return SupervisorNeeds(python=sys.executable, version=sys.version_info[:3], packages=versions)


def put(request: PlaceRequest, stream: BinaryIO) -> Done:
    """Unpack a tar of plain files into the folder, which only this user may read."""
    import tarfile

    folder = _folder(request)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            target = os.path.normpath(os.path.join(folder, member.name))
            if not member.isfile() or not target.startswith(folder + os.sep):
                raise ValueError(f"unexpected entry in the archive: {member.name!r}")
            os.makedirs(os.path.dirname(target), exist_ok=True)
            source = archive.extractfile(member)
            assert source is not None  # it is a file
            with open(target, "wb") as out:
                shutil.copyfileobj(source, out)
    return Done()


def discard(request: PlaceRequest) -> Done:
    """Remove the folder, unless a supervisor was started in it before."""
    folder = _folder(request)
    if not os.path.isdir(os.path.join(folder, "runs")):
        shutil.rmtree(folder, ignore_errors=True)
    return Done()


def reach(request: PlaceRequest) -> SupervisorReach:
    """{"errors": {node: None or what is in the way}}: every node of the cluster file, over the connection that the supervisor will use."""
    command = [sys.executable, "-m", "homelab.controller.remote.reach", _cluster(_folder(request))]
    try:
        completed = subprocess.run(
            command, env=_environment(request), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_S
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the other nodes could not be tested within {_TRY_S:.0f} s") from None
    try:
        return SupervisorReach(errors=message.as_written(json.loads(completed.stdout.strip().splitlines()[-1])))
    except (ValueError, IndexError):
        last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
        raise Refusal(f"homelab's own program does not run with this Python: {last[:500]}", where=sys.executable) from None


def start(request: PlaceRequest) -> SupervisorStarted:
    """Start the supervisor detached; answers once it has its lock, or was not needed any more. Raises ValueError with its last words."""
    run, folder = request.run, _folder(request)
    run_folder = os.path.join(folder, "runs", run)
    log = os.path.join(run_folder, "supervisor.log")
    if _is_held(folder, run):
        return SupervisorStarted(log=log)
    _link_data(request.workdir, run_folder)
    command = [sys.executable, "-m", "homelab", "supervise", run, "--cluster", _cluster(folder), "--runs-dir", os.path.join(folder, "runs")]
    with open(log, "ab") as out:
        process = programs.detached(command, folder, _environment(request), out)
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if _is_held(folder, run):
            return SupervisorStarted(log=log)
        time.sleep(0.05)
    if process.poll() == 0:  # the run ended before the supervisor started
        return SupervisorStarted(log=log)
    processes.signal_all([process.pid], signal.SIGKILL)
    raise Refusal((files.tail(log, 1) or [f"it took no lock within {_START_S:.0f} s"])[0], where=log)


def look(request: RunRequest) -> SupervisorLook:
    """Its own record, None when none was ever started here; and who acts on the run, as far as this node sees it."""
    return SupervisorLook(supervisor=state(request.workdir, request.run), owner=ownership.seen(request.workdir, request.run))


def state(workdir: str, run: str) -> SupervisorReply | None:
    """The same for `poll`. "alive": it has its lock, which the kernel drops with its holder. "frozen": a signal has stopped it. "events": the newest."""
    folder = paths.supervised_dir(workdir, run)
    run_folder = os.path.join(folder, "runs", run)
    if not os.path.isdir(run_folder):
        return None
    record = files.read_object(os.path.join(run_folder, "supervisor.json")) or {}
    events = files.json_objects(files.tail(os.path.join(run_folder, "events.jsonl"), _EVENTS))
    is_frozen = processes.state(record.get("pid")) in ("T", "t")
    return SupervisorReply(
        alive=_is_held(folder, run),
        frozen=is_frozen,
        doing=record.get("doing") or "",
        why=record.get("why") or "",
        pid=record.get("pid"),
        log=os.path.join(run_folder, layout.SUPERVISOR_LOG),
        events=tuple(events),
    )


def end(request: EndRequest) -> SupervisorEnded:
    """End it as Ctrl-C does (a start that is under way is undone), after `grace_s` by force. Idempotent."""
    run, folder = request.run, _folder(request)
    pids = _pids(folder)
    if not pids:
        return SupervisorEnded(left=())
    processes.signal_all(pids, signal.SIGINT)
    processes.signal_all(pids, signal.SIGCONT)
    left = _wait_for(pids, request.grace_s)
    processes.signal_all(left, signal.SIGKILL)
    left = _wait_for(left, 5.0)
    file = os.path.join(folder, "runs", run, "supervisor.json")
    record = files.read_object(file)
    if record is not None and record.get("doing") not in ("ended", "given up"):
        files.write_json(file, dict(record, doing="ended", why="stopped"))
    return SupervisorEnded(left=tuple(left))


def _folder(request: RunRequest) -> str:
    return paths.supervised_dir(request.workdir, request.run)


def _cluster(folder: str) -> str:
    return os.path.join(folder, "cluster.toml")


def _environment(request: PlaceRequest) -> dict[str, str]:
    """The shipped program in place of the agent that answers here."""
    code = paths.expand(request.code)
    if not os.path.exists(os.path.join(code, "complete")):
        raise ValueError(f"the supervisor's program is not there: {code}")
    return dict(os.environ, PYTHONPATH=code, PYTHONUNBUFFERED="1")


def _link_data(workdir: str, run_folder: str) -> None:
    """Link the data that was shipped to this node for the training, so that the supervisor needs no second copy."""
    described = files.read_json(os.path.join(run_folder, "run.json")) or {}
    linked = set()
    for entry in (described.get("data") or {}).values():
        if entry and entry.get("sent") == "shipped":
            source = transfer.data_path(workdir, entry)
            place = os.path.join(run_folder, "code", layout.place_inside(entry))
            if place in linked:  # rows to train on and held-out ones may have one name in two folders
                place = os.path.join(run_folder, "code", entry["sha256"], layout.place_inside(entry))
            linked.add(place)
            if os.path.exists(source) and not os.path.lexists(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                if os.path.getsize(source) > _MOST_COPIED_BYTES:
                    os.symlink(source, place)
                else:  # a recovery needs it, even when a person edits the copy of the training
                    shutil.copyfile(source, place + ".partial")
                    os.replace(place + ".partial", place)


def _is_held(folder: str, run: str) -> bool:
    return lock.is_held(os.path.join(folder, layout.run(run), layout.SUPERVISOR_LOCK))


def _pids(folder: str) -> list[int]:
    """The supervisor's processes, also one that has not come to its lock yet: no other program is given this file."""
    cluster = _cluster(folder)
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if " supervise " in processes.command_line(pid) and cluster in processes.command_line(pid)]


def _wait_for(pids: list[int], limit_s: float) -> list[int]:
    """The pids that are still alive after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while pids and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = [pid for pid in pids if processes.is_alive(pid)]
    return pids
