"""The collective smoke test on this node, or another short job: torchrun with `homelab.worker.tools.collective_check`, watched closely, and ended whole.

The processes carry HOMELAB_RUN=<name of the test>, as those of a run do, so whatever is left of them can be found.
"""

from __future__ import annotations

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
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import processes, programs
from homelab.shared.protocol import files, layout, message
from homelab.shared.protocol.collective_messages import CollectiveEnded, CollectiveLine, CollectiveLook, CollectiveRank
from homelab.shared.protocol.collective_stages import CONNECTING, DONE, STARTING, WAITING
from homelab.shared.protocol.message import Done

if TYPE_CHECKING:
    from homelab.shared.protocol.collective_messages import CollectiveRequest, JobRequest, KeepRequest
    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.run_messages import Stopped

_POLL_S = 0.05
_SOCKETS_EVERY_S = 0.25
_SIGN_OF_LIFE_S = 1.0
_OLD_S = 3600.0
_PR_SET_PDEATHSIG = 1
_SYN_SENT, _ESTABLISHED, _LISTEN = "02", "01", "0A"  # include/net/tcp_states.h


def collective(request: CollectiveRequest) -> None:
    """Run the test.

    Prints a JSON line whenever something changed, and every second: {"phase", "ranks": {rank: {"stage", "error", "results"}},
    "ended": null}. The last one has "ended": {"returncode", "left": [pid], "log", "errors"}. Ends when stdin closes, after
    `limit_s`, or with torchrun; nothing of the test is left then. Lines of "log" are torchrun's own, "errors" those of its ranks.
    """
    name, node = request.name, layout.checked(request.node)
    folder = _folder(request)
    _remove_old(os.path.dirname(folder))
    os.makedirs(folder)
    own = {"HOMELAB_RUN": name, "HOMELAB_NODE": node, "HOMELAB_COLLECTIVE_DIR": folder}
    environment = {**os.environ, **request.environment, **own}
    try:
        if request.input is not None:
            files.write_json(os.path.join(folder, "input.json"), request.input)
        with open(os.path.join(folder, "torchrun.log"), "wb") as log:
            child = programs.detached(request.command, folder, environment, log, preexec_fn=_end_with_the_agent)
    except (OSError, ValueError, subprocess.SubprocessError):
        _remove(folder)
        raise
    grace_s = 0.5
    try:
        # The ranks are done, so nothing is lost; torchrun itself needs a second to end.
        grace_s = 0.0 if _watch(request, folder, child) else grace_s
        returncode = child.poll()
    finally:
        left = _end(request, child, grace_s)
    ended = CollectiveEnded(returncode=returncode, left=left, log=_log(folder), errors=_errors(folder))
    line = CollectiveLine(phase=files.text(os.path.join(folder, "phase")) or STARTING, ranks=_as_said(_ranks(folder)), ended=ended)
    _remove(folder)
    _say(line)


def look(request: JobRequest) -> CollectiveLook:
    """What the test is doing here, while it hangs: {"phase", "ranks": {rank: {"stage", "stack"}}, "log"}. See `collective`."""
    folder = _folder(request)
    ranks = _ranks(folder)
    before = {rank: _size(os.path.join(folder, f"rank-{rank}.stack")) for rank in ranks}
    run_pids = processes.of_run(request.name, request.workdir, layout.checked(request.node))
    for state in ranks.values():
        if state.get("pid") in run_pids and state.get("stage") != DONE:
            processes.signal_all([state["pid"]], signal.SIGUSR1)
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        if all(_size(os.path.join(folder, f"rank-{rank}.stack")) > before[rank] for rank in ranks):
            time.sleep(0.05)  # it is written line by line
            break
        time.sleep(0.02)
    for rank, state in ranks.items():
        state["stack"] = files.tail(os.path.join(folder, f"rank-{rank}.stack"), 60)
    return CollectiveLook(phase=files.text(os.path.join(folder, "phase")), ranks=_as_said(ranks), log=_log(folder))


def end(request: JobRequest) -> Stopped:
    """End what is left of a test on this node: {"asked", "killed", "left"}, as `stop` answers. Idempotent."""
    outcome = processes.end_run(request.name, request.workdir, layout.checked(request.node), grace_s=1.0)
    _remove(_folder(request))
    return outcome


def keep(request: KeepRequest) -> Done:
    """Keep the record of a test that passed: `record` {"fingerprint", "time", "results"}."""
    files.write_json(paths.collective_file(request.workdir), request.record)
    return Done()


def _folder(request: JobRequest) -> str:
    return os.path.join(paths.expand(request.workdir), "collective", request.name)


def _remove_old(folder: str) -> None:
    """Remove what earlier tests left on a node that lost its power."""
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


def _remove(folder: str) -> None:
    """Remove a folder. Tries several times: a process that was just killed may still finish a file."""
    for _ in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.05)


def _end_with_the_agent() -> None:
    """In the child, before torchrun: SIGTERM when the agent ends for any reason (Linux only; on other systems the time limits end the test)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch(request: CollectiveRequest, folder: str, child: subprocess.Popen[bytes]) -> bool:
    """Print changes until torchrun ends, the controller is gone, or the time is over. True when all ranks are done."""
    unwanted = threading.Event()

    def wait_for_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        unwanted.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    deadline = time.monotonic() + request.limit_s
    phase, last_line, said_at, looked_at = STARTING, None, 0.0, 0.0
    while time.monotonic() < deadline:
        has_ended = child.poll() is not None
        ranks = _ranks(folder)
        if phase != WAITING and (ranks or time.monotonic() - looked_at >= _SOCKETS_EVERY_S):
            looked_at = time.monotonic()
            phase = WAITING if ranks else _phase(child.pid, request.head_port, phase)
            with open(os.path.join(folder, "phase"), "w") as stream:
                stream.write(phase)
        line = CollectiveLine(phase=phase, ranks=_as_said(ranks))
        if line != last_line or time.monotonic() - said_at >= _SIGN_OF_LIFE_S:
            if not _say(line):
                return False
            last_line, said_at = line, time.monotonic()
        if len(ranks) == request.ranks and all(state.get("stage") == DONE for state in ranks.values()):
            return True
        if has_ended or unwanted.wait(_POLL_S):
            break
    return False


def _say(line: CollectiveLine) -> bool:
    """Print one line to the controller; False when the controller is gone."""
    try:
        sys.stdout.write(json.dumps(line, default=message.fields) + "\n")
        sys.stdout.flush()
        return True
    except (OSError, ValueError):
        return False


def _end(request: CollectiveRequest, child: subprocess.Popen[bytes], grace_s: float) -> tuple[int, ...]:
    """End all processes of the test. Returns the pids that could not be ended."""
    left = processes.end_run(request.name, request.workdir, request.node, grace_s=grace_s).left
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    return left


def _as_said(states: dict[int, JsonObject]) -> dict[int, CollectiveRank]:
    """What the ranks wrote, without what is for this node alone."""
    return {
        rank: message.as_written({name: value for name, value in state.items() if name in message.defaults(CollectiveRank)})
        for rank, state in states.items()
    }


def _ranks(folder: str) -> dict[int, JsonObject]:
    """{rank: the state that it wrote}."""
    states: dict[int, JsonObject] = {}
    try:
        names = os.listdir(folder)
    except OSError:
        return states
    for name in names:
        if name.startswith("rank-") and name.endswith(".json") and name[5:-5].isdecimal():
            state = files.read_object(os.path.join(folder, name))
            if state is not None:
                states[int(name[5:-5])] = state
    return states


def _log(folder: str) -> tuple[str, ...]:
    """The last lines of torchrun itself."""
    return tuple(files.tail(os.path.join(folder, "torchrun.log"), 40))


def _errors(folder: str) -> tuple[str, ...]:
    """The last lines that the ranks wrote to stderr, as torchrun kept them, after those of NCCL."""
    lines = []
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "nccl-*.log"))):
        lines += files.tail(path, 10)
    for root, _, names in sorted(os.walk(os.path.join(folder, "logs"))):
        if "stderr.log" in names:
            lines += files.tail(os.path.join(root, "stderr.log"), 20)
    return tuple(lines[-40:])


def _phase(pid: int, port: int, before: str) -> str:
    """How far torchrun is with its rendezvous. Its sockets are the only sign of it."""
    states = _states(pid, port)
    if _ESTABLISHED in states or _LISTEN in states:
        return WAITING
    return CONNECTING if _SYN_SENT in states else before


def _states(pid: int, port: int) -> set[str]:
    """States of the TCP sockets of a process whose own or other port is `port` (proc_pid_net(5))."""
    inodes = set()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            target = _link(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return set()
    states = set()
    for table in ("tcp", "tcp6") if inodes else ():
        try:
            with open(f"/proc/{pid}/net/{table}") as stream:
                rows = [line.split() for line in stream][1:]
        except OSError:
            continue
        for row in rows:
            ports = {int(row[1].rpartition(":")[2], 16), int(row[2].rpartition(":")[2], 16)}
            if port in ports and row[9] in inodes:
                states.add(row[3])
    return states


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
