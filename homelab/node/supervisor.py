"""A run's supervisor on this node (`homelab launch --supervise head`): what it needs, whether it is at work, its start and its end.

It is the controller's own program, shipped into a code folder of its own; here are only the questions about it. All of it lies in
`<workdir>/supervised/<run>/`: cluster.toml as this node sees the others, their host keys, and `runs/<run>/` like a controller's.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

from homelab.node import files, paths, processes, transfer

_EVENTS = 50  # of the newest; whoever looks more seldom than so much happens has missed something
_START_S = 30.0  # a node that trains on all its cores takes its time to import
_TRY_S = 60.0
_MOST_COPIED_BYTES = 64 << 20


class _Failure(ValueError):
    def __init__(self, message, where=None):
        super().__init__(message)
        self.where = where


def needs(request):
    """This Python, and which of `packages` (names of distributions) it lacks."""
    import importlib.metadata  # here, and tarfile below: `poll` asks this module often, and only for `state`

    missing = []
    for name in request["packages"]:
        try:
            importlib.metadata.version(str(name))
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    return {"python": sys.executable, "version": list(sys.version_info[:3]), "missing": missing}


def put(request, stream):
    """Unpack a tar of plain files into the folder, which only this user may read."""
    import tarfile

    folder = _folder(request)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    os.chmod(folder, 0o700)
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            target = os.path.normpath(os.path.join(folder, member.name))
            if not member.isfile() or not target.startswith(folder + os.sep):
                raise ValueError("unexpected entry in the archive: %r" % member.name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as out:
                shutil.copyfileobj(archive.extractfile(member), out)
    return {"folder": folder}


def discard(request):
    """Take the folder away again, unless a supervisor was ever started in it."""
    folder = _folder(request)
    if not os.path.isdir(os.path.join(folder, "runs")):
        shutil.rmtree(folder, ignore_errors=True)
    return {"folder": folder}


def reach(request):
    """{"errors": {node: None or what is in the way}}: every node of the cluster file, tried as the supervisor itself would."""
    command = [sys.executable, "-m", "homelab.remote.reach", _cluster(_folder(request))]
    try:
        done = subprocess.run(command, env=_environment(request), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_S)
    except subprocess.TimeoutExpired:
        raise ValueError("the other nodes could not be tried within %d s" % _TRY_S) from None
    try:
        return {"errors": json.loads(done.stdout.strip().splitlines()[-1])}
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["exit code %d" % done.returncode])[-1]
        raise _Failure("homelab's own program does not run with this Python: %s" % last[:500], sys.executable) from None


def start(request):
    """Start the supervisor detached; answers once it has its lock, or was not needed any more. Raises ValueError with its last words."""
    run, folder = paths.checked(request["run"]), _folder(request)
    here = os.path.join(folder, "runs", run)
    log = os.path.join(here, "supervisor.log")
    if _is_held(folder, run):
        return {"log": log}
    _link_data(request["workdir"], here)
    command = [sys.executable, "-m", "homelab", "supervise", run, "--cluster", _cluster(folder), "--runs-dir", os.path.join(folder, "runs")]
    with open(log, "ab") as out:
        process = subprocess.Popen(
            command, env=_environment(request), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder
        )
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if _is_held(folder, run):
            return {"log": log}
        time.sleep(0.05)
    if process.poll() == 0:  # the run was over before it looked
        return {"log": log}
    processes.signal_all([process.pid], signal.SIGKILL)
    raise _Failure((files.tail(log, 1) or ["it took no lock within %d s" % _START_S])[0], log)


def look(request):
    """{"supervisor": what it says of itself, None where none was ever started here}."""
    return {"supervisor": state(request["workdir"], request["run"])}


def state(workdir, run):
    """The same for `poll`. "alive": it has its lock, which the kernel drops with its holder. "events": what it wrote down last."""
    folder = paths.supervised_dir(workdir, run)
    here = os.path.join(folder, "runs", run)
    if not os.path.isdir(here):
        return None
    said = files.read_json(os.path.join(here, "supervisor.json"))
    said = said if isinstance(said, dict) else {}
    known = {key: said.get(key) for key in ("doing", "why", "attempt", "pid") if said.get(key) is not None}
    events = files.objects(files.tail(os.path.join(here, "events.jsonl"), _EVENTS))
    return dict(known, alive=_is_held(folder, run), log=os.path.join(here, "supervisor.log"), events=events)


def end(request):
    """End it as Ctrl-C does (a start that is under way is undone), after `grace_s` by force: {"was_alive", "left": [pid, ...]}. Idempotent."""
    run, folder = paths.checked(request["run"]), _folder(request)
    pids = _pids(folder)
    if not pids:
        return {"was_alive": False, "left": []}
    processes.signal_all(pids, signal.SIGINT)
    processes.signal_all(pids, signal.SIGCONT)
    left = _wait_for(pids, float(request.get("grace_s", 20.0)))
    processes.signal_all(left, signal.SIGKILL)
    left = _wait_for(left, 5.0)
    file = os.path.join(folder, "runs", run, "supervisor.json")
    said = files.read_json(file)
    if isinstance(said, dict) and said.get("doing") not in ("ended", "given up"):
        files.write_json(file, dict(said, doing="ended", why="stopped"))
    return {"was_alive": True, "left": left}


def _folder(request):
    return paths.supervised_dir(request["workdir"], request["run"])


def _cluster(folder):
    return os.path.join(folder, "cluster.toml")


def _environment(request):
    """The shipped program in place of the agent that answers here."""
    code = paths.expand(request["code"])
    if not os.path.exists(os.path.join(code, "complete")):
        raise ValueError("the supervisor's program is not there: %s" % code)
    return dict(os.environ, PYTHONPATH=code, PYTHONUNBUFFERED="1")


def _link_data(workdir, here):
    """What was shipped to this node for the training need not be sent again for its supervisor."""
    described = files.read_json(os.path.join(here, "run.json")) or {}
    for entry in (described.get("data") or {}).values():
        if entry and entry.get("sent") == "shipped":
            source = transfer.data_path(dict(entry, workdir=workdir))
            place = os.path.join(here, "code", transfer.inside(entry))
            if os.path.exists(source) and not os.path.lexists(place):
                os.makedirs(os.path.dirname(place), exist_ok=True)
                if os.path.getsize(source) > _MOST_COPIED_BYTES:
                    os.symlink(source, place)
                else:  # so that a recovery has it, also where somebody edits the one of the training
                    shutil.copyfile(source, place + ".partial")
                    os.replace(place + ".partial", place)


def _is_held(folder, run):
    """Whether somebody has the lock (twin of `homelab.runs.lock.is_held`)."""
    try:
        descriptor = os.open(os.path.join(folder, "runs", paths.checked(run), "supervisor.lock"), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _pids(folder):
    """The supervisor's processes, also one that has not come to its lock yet: no other program is given this file."""
    wanted = _cluster(folder)
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in found if " supervise " in processes.command_line(pid) and wanted in processes.command_line(pid)]


def _wait_for(pids, limit_s):
    """Those that are still there after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while pids and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = [pid for pid in pids if processes.is_alive(pid)]
    return pids
