"""The detached part of the agent: starts torchrun in its own session, waits for it, writes down how it ended.

It outlives the SSH connection, the terminal and the controller. torchrun handles SIGHUP itself, so `nohup` would not do:
a new session (setsid) is what keeps it alive.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, claims, energy_meter, isolation_guard, rank_launcher, secret_files, standby
from homelab.node.storage import program_checkpoints
from homelab.node.system import boot_clock, processes, programs, utilisation
from homelab.shared.protocol import files, layout, lock, message
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.run_messages import Exit, Stopped
from homelab.shared.protocol.run_requests import StopRequest

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.run_requests import StartRequest, UndoRequest

_LOOK_S = 0.1
_MOST_NAMED = 100  # attempts whose names of this machine are told
# The end of ChildFailedError's text, whole (torch/distributed/elastic/multiprocessing/errors/__init__.py of 2.13).
_ROOT_CAUSE = re.compile(r"^Root Cause \(first observed failure\):\n.*^={20,}$", re.MULTILINE | re.DOTALL)


def start(request: StartRequest) -> Done:
    """Write the run's files and start the detached watcher. Answers once torchrun runs, or with its start error.

    Raises ValueError for a request that cannot be, claims.RefusedError where the run is not the asker's, OSError where the disk refuses.
    """
    run, attempt, node = request.run, request.attempt, layout.checked(request.node)
    folder = paths.run_dir(request.workdir, run)
    node_dir = paths.node_dir(folder, attempt, node)
    began_s = boot_clock.clock_s()
    with claims.starting(request):
        if lock.is_held(paths.setup_lock()):  # half of its packages may be there
            raise claims.RefusedError("busy", "setup or teardown works on this node", "wait until it has ended, then run the command again")
        watcher = _start_watcher(request, folder, node_dir)
    try:
        _wait_for_torchrun(watcher, node_dir)
    except OSError:
        if claims.was_stopped(request, began_s):
            raise claims.RefusedError("stopped", f"{run} was stopped by hand during its start", claims.goes_on(run)) from None
        raise
    return Done()


def _start_watcher(request: StartRequest, folder: str, node_dir: str) -> subprocess.Popen[bytes] | standby.ToldHolder:
    run, attempt = request.run, request.attempt
    if os.path.exists(os.path.join(node_dir, "agent.json")):
        raise claims.RefusedError("taken", f"attempt {attempt} of {run} was started on this node already", claims.see(run))
    newest = paths.newest_attempt(folder)
    if newest > attempt:  # a controller that was cut off does not know that the run has continued
        raise claims.RefusedError("superseded", f"attempt {attempt} of {run} is over: this node knows attempt {newest}", claims.see(run))
    try:
        start = _write_down(request, folder, node_dir)
        claims.refuse_undone(request)  # behind start.json: who undoes or stops it now finds that
    except BaseException:  # a full disk: it has not begun, and must not look as if it were about to
        secret_files.remove(folder)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(node_dir, layout.START_JSON))
        if not paths.names_here(folder, attempt):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(paths.attempt_dir(folder, attempt), layout.PLAN_JSON))
        raise
    if request.direct and (waiting := standby.take(folder, start, node_dir)) is not None:
        return waiting
    own = {"HOMELAB_RUN": run, "HOMELAB_NODE": request.node, "HOMELAB_ATTEMPT": str(attempt), "HOMELAB_RUN_DIR": folder}
    with open(os.path.join(node_dir, "agent.log"), "ab") as log:
        return programs.detached([sys.executable, "-m", "homelab.node", "watch", node_dir], folder, {**os.environ, **own}, log)


def _write_down(request: StartRequest, folder: str, node_dir: str) -> JsonObject:
    """All that an attempt begins with; start.json, which comes last."""
    files.write_json(os.path.join(folder, "run.json"), request.run_json)
    files.write_json(os.path.join(paths.attempt_dir(folder, request.attempt), "plan.json"), request.plan_json)
    if request.run_json.get("recipe", {}).get("script"):
        program_checkpoints.restore(folder, int(request.plan_json.get("resume_step") or 0))
    secret_files.put(folder, request.secrets)
    ranks = [
        {"rank": rank["rank"], "local_rank": rank["local_rank"]}
        for rank in attempt_records.plan(folder, request.attempt)["ranks"]
        if rank["node"] == request.node
    ]
    start = {
        "command": request.command, "environment": request.environment, "run": request.run, "node": request.node, "attempt": request.attempt,
        "program": request.program, "direct": request.direct, "standby_after_s": request.standby_after_s, "ranks": ranks,
    }  # fmt: skip
    files.write_json(os.path.join(node_dir, "start.json"), dict(start, token=request.token))
    return start


def _wait_for_torchrun(watcher: subprocess.Popen[bytes] | standby.ToldHolder, node_dir: str) -> None:
    """Until torchrun runs. Raises OSError where it does not."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        if files.read_json(os.path.join(node_dir, "agent.json")):
            return
        ended = files.read_json(os.path.join(node_dir, "exit.json"))
        if ended:
            raise OSError(f"torchrun did not start: {ended.get('error') or f'see {node_dir}'}")
        if watcher.poll() is not None:
            last_line = files.tail(os.path.join(node_dir, "agent.log"), 1) or [f"see {node_dir}"]
            # A disk that is full cannot hold agent.log either; the exit code carries the cause.
            if watcher.returncode == errno.ENOSPC or "Errno 28" in last_line[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), node_dir)
            raise OSError(f"the agent ended before torchrun ran: {last_line[0]}")
        time.sleep(0.01)
    raise OSError(f"the agent did not start torchrun within 20 s; see {os.path.join(node_dir, 'agent.log')}")


def watch(node_dir: str, waiting: subprocess.Popen[bytes] | None = None) -> None:
    """Run torchrun as described in `node_dir`/start.json until it ends; then write exit.json. `waiting`: a `rank_launcher` that has prepared it.

    Exits with the number of the error where the disk refuses: what cannot be written down must not run on unseen.
    """
    # `stop` signals this process, too; the end must be written down all the same. (An ignored signal, SIG_IGN, would be inherited by torchrun.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    plan = files.read_json(os.path.join(node_dir, layout.START_JSON))
    folder = os.environ["HOMELAB_RUN_DIR"]
    workdir = os.path.dirname(os.path.dirname(folder))
    try:
        child = _torchrun(plan, folder, node_dir, waiting)
    except (OSError, ValueError) as error:
        secret_files.remove(folder)
        _write_exit(node_dir, Exit(returncode=127, ended_at=time.time(), error=str(error)))
        return
    agent = {"pid": os.getpid(), "torchrun_pid": child.pid, "started_at": time.time(), "boot_id": boot_clock.boot_id()}
    try:
        files.write_json(os.path.join(node_dir, "agent.json"), agent)
    except OSError as error:
        processes.end_run(plan["run"], workdir, plan["node"], grace_s=1.0, spare=(os.getpid(),))
        secret_files.remove(folder)
        sys.exit(error.errno or 1)
    guard = isolation_guard.Guard(workdir, plan["run"], plan["attempt"], plan["node"])
    with isolation_guard.awake(plan["run"]), energy_meter.Meter(node_dir), guard, standby.Preparing(plan, folder, node_dir):
        returncode = _ended(child, None if plan.get("direct") or not plan.get("program") else os.path.join(node_dir, "err.log"))
    # Workers that survive a killed torchrun would hold the card and the port.
    processes.end_run(plan["run"], workdir, plan["node"], grace_s=5.0, spare=(os.getpid(),), standbys=returncode == 0)
    secret_files.remove(folder)
    end = Exit(
        returncode=returncode if returncode >= 0 else None,
        signal=-returncode if returncode < 0 else None,
        ended_at=time.time(),
        stopped=os.path.exists(os.path.join(node_dir, "stop")),
        alone=guard.reason,
    )
    _write_exit(node_dir, end)


def _torchrun(plan: JsonObject, folder: str, node_dir: str, waiting: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    """Start torchrun, or what stands in its place, with the paths of the run's secrets and the plan's variables. Raises OSError or ValueError."""
    environment = secret_files.environment_of(folder, {**os.environ, **plan["environment"]})
    if program_checkpoints.is_program(folder):
        environment[program_checkpoints.LAST] = program_checkpoints.last_path(folder)
    # Where NCCL's flight recorder writes (torch/csrc/distributed/c10d: FlightRecorder.hpp, ProcessGroupNCCL.cpp).
    environment["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(node_dir, "nccl-trace-")
    if _takes_pipes(node_dir):
        environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = os.path.join(node_dir, "nccl-dump-")
    if plan.get("direct"):
        return rank_launcher.begin(rank_launcher.order(plan, environment, folder, node_dir), waiting)
    with open(os.path.join(node_dir, "out.log"), "ab") as out, open(os.path.join(node_dir, "err.log"), "ab") as err:
        return programs.detached(plan["command"], folder, environment, out, err)


def _ended(child: subprocess.Popen[bytes], words: str | None) -> int:
    """Wait for the end of torchrun, or what stands in its place; its exit code. `words`: torchrun's own file of errors, in which no rank writes.

    When torchrun has said whose fault it was, its exit code is 1, and it needs a third of a second more to take its interpreter down (measured).
    """
    seen_bytes = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_LOOK_S)
        if words is None:
            return child.wait()
        size_bytes = os.stat(words).st_size if os.path.exists(words) else 0
        if size_bytes != seen_bytes and _ROOT_CAUSE.search("\n".join(files.tail(words, 60))):
            child.kill()
            child.wait()
            return 1
        seen_bytes = size_bytes


def _takes_pipes(folder: str) -> bool:
    """Whether a named pipe can be made in a folder. On exFAT, NTFS and a /mnt of WSL2 it cannot, and torch, told to make one there, ends the
    process (ProcessGroupNCCL.hpp, DumpPipe)."""
    probe = os.path.join(folder, f"pipe-{os.getpid()}.probe")
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return False
    return True


def _write_exit(node_dir: str, end: Exit) -> None:
    try:
        files.write_json(os.path.join(node_dir, layout.EXIT_JSON), message.fields(end))
    except OSError as error:
        sys.exit(error.errno or 1)


def mark_stop(request: StopRequest) -> Done:
    """Write down that a stop is meant, before anything is signalled: ranks whose peers were stopped first will fail."""
    with claims.stopping(request):
        node_dir = _unfinished(request)
        if node_dir is not None:
            files.write_json(os.path.join(node_dir, "stop"), {"time": time.time()})
    return Done()


def stop(request: StopRequest) -> Stopped:
    """End a run on this node and verify that nothing of it is left. Idempotent; a run this node does not know is stopped.

    A full disk does not prevent the stop: records that cannot be written are left out.
    """
    frozen = None
    try:
        with contextlib.suppress(OSError):
            mark_stop(request)
    except claims.RefusedError as error:
        if error.kind != "frozen" or not request.by_hand:
            raise
        frozen = error
    outcome = _stop_everywhere(request)
    if frozen is not None:  # running processes are ended all the same, and the frozen process starts none without its claim
        raise frozen
    return outcome


def _stop_everywhere(request: StopRequest) -> Stopped:
    outcome = _stop(request)
    made_in = request.made_in
    if made_in and os.path.realpath(paths.expand(made_in)) != os.path.realpath(paths.expand(request.workdir)):
        moved = request.replace(workdir=made_in)
        if os.path.isdir(paths.run_dir(made_in, request.run)):
            with contextlib.suppress(OSError):
                mark_stop(moved)
        moved_outcome = _stop(moved)
        return Stopped(
            asked=outcome.asked + moved_outcome.asked,
            killed=outcome.killed + moved_outcome.killed,
            left=outcome.left + moved_outcome.left,
            # the names in this workdir count; those in the other one only where it has none
            as_nodes=outcome.as_nodes or moved_outcome.as_nodes,
        )
    return outcome


def _stop(request: StopRequest) -> Stopped:
    folder, node = paths.run_dir(request.workdir, request.run), layout.checked(request.node)
    is_recovery = request.token is not None  # what waits for the next attempt is for it
    ranks = attempt_records.rank_pids(folder)
    outcome = processes.end_run(request.run, request.workdir, node, grace_s=request.grace_s, ranks=ranks, standbys=not is_recovery)
    if outcome.asked:
        utilisation.wait_for_cards()
    secret_files.remove(folder)
    node_dir = _unfinished(request)
    if node_dir is not None:
        # The watcher itself had to be killed, or was gone before: write the end in its place.
        end = {"returncode": None, "signal": int(signal.SIGKILL), "ended_at": time.time(), "stopped": True}
        with contextlib.suppress(OSError):
            files.write_json(os.path.join(node_dir, "exit.json"), end)
    names = [paths.names_here(folder, number) for number in itertools.islice(paths.attempts(folder), _MOST_NAMED)]
    # Where nodes share a disk all their names are there, and this machine speaks for its own.
    own = {name for node_names in names for name in node_names if len(node_names) == 1 or name == request.node}
    return outcome.replace(as_nodes=tuple(sorted(own)))


def undo(request: UndoRequest) -> Stopped:
    """A start that did not come to its end on all nodes: end what it has begun here, and nothing of anybody else."""
    if claims.undo(request):
        return stop(StopRequest(node=request.node, workdir=request.workdir, run=request.run, grace_s=request.grace_s))
    return Stopped(asked=0, killed=0, left=())


def _unfinished(request: StopRequest) -> str | None:
    """This node's folder of the newest attempt, when it was begun here and has not written how it ended; else None."""
    folder = paths.run_dir(request.workdir, request.run)
    newest = paths.newest_attempt(folder)
    if not newest:
        return None
    node_dir = paths.node_dir(folder, newest, paths.name_here(folder, newest, request.node))
    return node_dir if os.path.isdir(node_dir) and not os.path.exists(os.path.join(node_dir, "exit.json")) else None
