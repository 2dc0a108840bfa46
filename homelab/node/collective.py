"""The collective smoke test on this node: torchrun with `homelab.worker.smoke`, watched closely, and ended whole.

The processes carry HOMELAB_RUN=<name of the test>, as those of a run do, so whatever is left of them can be found.
"""

import contextlib
import ctypes
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

from homelab.node import files, paths, processes

STARTING = "starting torchrun"
CONNECTING = "connecting to the head"
WAITING = "waiting for the other nodes"
_POLL_S = 0.05
_SOCKETS_EVERY_S = 0.25
_SIGN_OF_LIFE_S = 1.0
_LIMIT_S = 300.0
_OLD_S = 3600.0
_PR_SET_PDEATHSIG = 1
_SYN_SENT, _ESTABLISHED, _LISTEN = "02", "01", "0A"  # include/net/tcp_states.h


def collective(request):
    """Run the test. `request`: node, workdir, name, command, environment, ranks (how many here), head_port, limit_s.

    Prints a JSON line whenever something changed, and every second: {"phase", "ranks": {rank: {"stage", "error", "results"}},
    "ended": null}. The last one has "ended": {"returncode", "left": [pid], "log", "errors"}. Ends when stdin closes, after
    `limit_s`, or with torchrun; nothing of the test is left then. Lines of "log" are torchrun's own, "errors" those of its ranks.
    """
    name, node = paths.checked(request["name"]), paths.checked(request["node"])
    folder = _folder(request)
    _remove_old(os.path.dirname(folder))
    os.makedirs(folder)
    environment = dict(os.environ)
    environment.update(request["environment"])
    environment.update({"HOMELAB_RUN": name, "HOMELAB_NODE": node, "HOMELAB_COLLECTIVE_DIR": folder})
    try:
        with open(os.path.join(folder, "torchrun.log"), "wb") as log:
            child = subprocess.Popen(
                request["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
                preexec_fn=_end_with_the_agent,
            )
    except (OSError, ValueError, subprocess.SubprocessError):
        _remove(folder)
        raise
    grace_s = 0.5
    try:
        # Nothing is lost with ranks that are done, and torchrun takes a second to leave.
        grace_s = 0.0 if _watch(request, folder, child) else grace_s
        returncode = child.poll()
    finally:
        left = _end(request, child, grace_s)
    ended = {"returncode": returncode, "left": left, "log": _log(folder), "errors": _errors(folder)}
    line = {"phase": _phase_name(folder, STARTING), "ranks": _ranks(folder), "ended": ended}
    _remove(folder)
    _say(line)


def look(request):
    """What the test is doing here, while it hangs: {"phase", "ranks": {rank: {"stage", "stack"}}, "log"}. See `collective`."""
    folder = _folder(request)
    ranks = _ranks(folder)
    before = {rank: _size(os.path.join(folder, "rank-%s.stack" % rank)) for rank in ranks}
    ours = processes.of_run(paths.checked(request["name"]), request["workdir"], paths.checked(request["node"]))
    for known in ranks.values():
        if known.get("pid") in ours and known.get("stage") != "done":
            processes.signal_all([known["pid"]], signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if all(_size(os.path.join(folder, "rank-%s.stack" % rank)) > before[rank] for rank in ranks):
            time.sleep(0.05)  # it is written line by line
            break
        time.sleep(0.02)
    for rank, known in ranks.items():
        known["stack"] = files.tail(os.path.join(folder, "rank-%s.stack" % rank), 60)
    return {
        "phase": _phase_name(folder, ""),
        "ranks": ranks,
        "log": _log(folder),
    }


def end(request):
    """End what is left of a test on this node: {"asked", "killed", "left"}, as `stop` answers. Idempotent."""
    outcome = processes.end_run(paths.checked(request["name"]), request["workdir"], paths.checked(request["node"]), grace_s=1.0)
    _remove(_folder(request))
    return outcome


def keep(request):
    """Keep the record of a test that passed: `record` {"fingerprint", "time", "results"}."""
    path = paths.collective_file(request["workdir"])
    files.write_json(path, request["record"])
    return {"path": path}


def _folder(request):
    return os.path.join(paths.expand(request["workdir"]), "collective", paths.checked(request["name"]))


def _remove_old(folder):
    """What tests have left whose node lost its power."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        path = os.path.join(folder, name)
        try:
            if time.time() - os.stat(path).st_mtime > _OLD_S:
                _remove(path)
        except OSError:
            continue


def _remove(folder):
    """Remove a folder. More than once: what was just killed may still finish making a file."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def _end_with_the_agent():
    """In the child, before torchrun: SIGTERM when the agent is gone, however it went (Linux; elsewhere the limits must do)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch(request, folder, child):
    """Say what changes until torchrun has ended, nobody listens any more, or the time is over. True when all ranks are done."""
    unwanted = threading.Event()

    def wait_for_end():
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        unwanted.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    deadline = time.monotonic() + min(_LIMIT_S, float(request.get("limit_s", _LIMIT_S)))
    phase, said, said_at, looked_at = STARTING, None, 0.0, 0.0
    while time.monotonic() < deadline:
        has_ended = child.poll() is not None
        ranks = _ranks(folder)
        if phase != WAITING and (ranks or time.monotonic() - looked_at >= _SOCKETS_EVERY_S):
            looked_at = time.monotonic()
            phase = WAITING if ranks else _phase(child.pid, int(request["head_port"]), phase)
            _write(os.path.join(folder, "phase"), phase)
        line = {"phase": phase, "ranks": ranks, "ended": None}
        if line != said or time.monotonic() - said_at >= _SIGN_OF_LIFE_S:
            if not _say(line):
                return False
            said, said_at = line, time.monotonic()
        if len(ranks) == int(request["ranks"]) and all(known.get("stage") == "done" for known in ranks.values()):
            return True
        if has_ended or unwanted.wait(_POLL_S):
            break
    return False


def _say(line):
    """One line to the controller; False when nobody listens."""
    try:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        return True
    except (OSError, ValueError):
        return False


def _end(request, child, grace_s):
    """End all processes of the test; what could not be ended."""
    left = processes.end_run(request["name"], request["workdir"], request["node"], grace_s=grace_s)["left"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    return left


def _ranks(folder):
    """{rank: what it wrote down}."""
    found = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        if name.startswith("rank-") and name.endswith(".json") and name[5:-5].isdecimal():
            known = files.read_json(os.path.join(folder, name))
            if isinstance(known, dict):
                found[name[5:-5]] = known
    return found


def _log(folder):
    """The last lines of torchrun itself."""
    return files.tail(os.path.join(folder, "torchrun.log"), 40)


def _errors(folder):
    """The last lines that the ranks wrote to stderr, as torchrun kept them, after those of NCCL."""
    lines = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "nccl-*.log"))):
        lines += files.tail(path, 10)
    for root, _, names in sorted(os.walk(os.path.join(folder, "logs"))):
        if "stderr.log" in names:
            lines += files.tail(os.path.join(root, "stderr.log"), 20)
    return lines[-40:]


def _phase(pid, port, before):
    """How far torchrun is with finding the others, from its sockets: the only thing that it lets see of itself."""
    states = _states(pid, port)
    if _ESTABLISHED in states or _LISTEN in states:
        return WAITING
    return CONNECTING if _SYN_SENT in states else before


def _states(pid, port):
    """States of the TCP sockets of a process whose own or other port is `port` (proc_pid_net(5))."""
    inodes = set()
    try:
        for name in os.listdir("/proc/%d/fd" % pid):
            target = _link("/proc/%d/fd/%s" % (pid, name))
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return set()
    found = set()
    for table in ("tcp", "tcp6") if inodes else ():
        try:
            with open("/proc/%d/net/%s" % (pid, table)) as stream:
                rows = [line.split() for line in stream][1:]
        except OSError:
            continue
        for row in rows:
            ports = {int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16)}
            if port in ports and row[9] in inodes:
                found.add(row[3])
    return found


def _link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _size(path):
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _write(path, text):
    with open(path, "w") as stream:
        stream.write(text)


def _phase_name(folder, default):
    try:
        with open(os.path.join(folder, "phase")) as stream:
            return stream.read() or default
    except OSError:
        return default
