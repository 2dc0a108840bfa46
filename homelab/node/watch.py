"""The detached part of the agent: starts torchrun in its own session, waits for it, writes down how it ended.

It outlives the SSH connection, the terminal and the controller. torchrun handles SIGHUP itself, so `nohup` would not do:
a new session (setsid) is what keeps it alive.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time

from homelab.node import claims, files, guard, load, paths, processes, records
from homelab.node.claims import boot_id


def start(request):
    """Write the run's files and start the detached watcher. Answers once torchrun runs, or with its start error.

    `request`: workdir, run, attempt, node, run_json, plan_json, command, environment, secrets, token (of the claim on the run).
    Raises ValueError for a request that cannot be, claims.RefusedError where the run is not the asker's, OSError where the disk refuses.
    """
    run, attempt, node = paths.checked(request["run"]), int(request["attempt"]), paths.checked(request["node"])
    folder = paths.run_dir(request["workdir"], run)
    here = paths.node_dir(folder, attempt, node)
    began_s = claims.clock_s()
    with claims.starting(request):
        watcher = _start_watcher(request, run, attempt, folder, here)
    try:
        return _started(watcher, here, folder)
    except OSError:
        if claims.was_stopped(request, began_s):
            raise claims.RefusedError("stopped", "%s was stopped by hand while it was being started" % run, claims.goes_on(run)) from None
        raise


def _start_watcher(request, run, attempt, folder, here):
    if os.path.exists(os.path.join(here, "agent.json")):
        raise claims.RefusedError("taken", "attempt %d of %s was started on this node already" % (attempt, run), claims.see(run))
    newest = (paths.attempts(folder) or [0])[-1]
    if newest > attempt:  # somebody who was cut off does not know that the run has gone on
        said = "attempt %d of %s is over: this node knows attempt %d" % (attempt, run, newest)
        raise claims.RefusedError("superseded", said, claims.see(run))
    files.write_json(os.path.join(folder, "run.json"), request["run_json"])
    files.write_json(os.path.join(paths.attempt_dir(folder, attempt), "plan.json"), request["plan_json"])
    secrets = request.get("secrets") or {}
    if secrets:
        files.write_json(os.path.join(folder, "secrets.json"), secrets, mode=0o600)
    start = {key: request[key] for key in ("command", "environment", "run", "node")}
    files.write_json(os.path.join(here, "start.json"), dict(start, attempt=attempt, token=request.get("token")))
    environment = dict(os.environ)
    environment.update({"HOMELAB_RUN": run, "HOMELAB_NODE": request["node"], "HOMELAB_ATTEMPT": str(attempt), "HOMELAB_RUN_DIR": folder})
    with open(os.path.join(here, "agent.log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "homelab.node", "watch", here],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=folder,
        )


def _started(watcher, here, folder):
    """What `start` answers, once torchrun runs. Raises OSError."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        agent = files.read_json(os.path.join(here, "agent.json"))
        if agent:
            return {"agent_pid": agent["pid"], "torchrun_pid": agent["torchrun_pid"], "run_dir": folder}
        ended = files.read_json(os.path.join(here, "exit.json"))
        if ended:
            raise OSError("torchrun did not start: %s" % ended.get("error", "see %s" % here))
        if watcher.poll() is not None:
            said = files.tail(os.path.join(here, "agent.log"), 1) or ["see %s" % here]
            # A disk that is full cannot hold agent.log either; the exit code carries the cause.
            if watcher.returncode == errno.ENOSPC or "Errno 28" in said[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), here)
            raise OSError("the agent ended before torchrun ran: %s" % said[0])
        time.sleep(0.01)
    raise OSError("the agent did not start torchrun within 20 s; see %s" % os.path.join(here, "agent.log"))


def watch(here):
    """Run torchrun as described in `here`/start.json until it ends; then write exit.json.

    Leaves with the number of the error where the disk refuses: what cannot be written down must not run on unseen.
    """
    # `stop` signals every process of the run, this one too; the end must be written down all the same. (Handlers, not
    # SIG_IGN: an ignored signal would be inherited by torchrun.)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGHUP, lambda number, frame: None)
    plan = files.read_json(os.path.join(here, "start.json"))
    folder = os.environ["HOMELAB_RUN_DIR"]
    workdir = os.path.dirname(os.path.dirname(folder))
    environment = dict(os.environ)
    environment.update(files.read_json(os.path.join(folder, "secrets.json")) or {})
    environment.update(plan["environment"])
    # Where NCCL's flight recorder writes (torch/csrc/distributed/c10d: FlightRecorder.hpp, ProcessGroupNCCL.cpp).
    environment["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(here, "nccl-trace-")
    if _takes_pipes(here):
        environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = os.path.join(here, "nccl-dump-")
    try:
        with open(os.path.join(here, "out.log"), "ab") as out, open(os.path.join(here, "err.log"), "ab") as err:
            child = subprocess.Popen(
                plan["command"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=folder,
            )
    except (OSError, ValueError) as error:
        remove_secrets(folder)
        _write(
            os.path.join(here, "exit.json"),
            {
                "returncode": 127,
                "signal": None,
                "ended_at": time.time(),
                "stopped": False,
                "error": str(error),
            },
        )
        return
    agent = {"pid": os.getpid(), "torchrun_pid": child.pid, "started_at": time.time(), "boot_id": boot_id()}
    try:
        files.write_json(os.path.join(here, "agent.json"), agent)
    except OSError as error:
        processes.end_run(plan["run"], workdir, plan["node"], grace_s=1.0, spare=(os.getpid(),))
        remove_secrets(folder)
        sys.exit(error.errno or 1)
    with guard.awake(plan["run"]), guard.Guard(workdir, plan["run"], plan["attempt"], plan["node"]) as kept:
        returncode = child.wait()
    # Workers that outlive a torchrun that was killed would hold the card and the port.
    processes.end_run(plan["run"], workdir, plan["node"], grace_s=5.0, spare=(os.getpid(),))
    remove_secrets(folder)
    _write(
        os.path.join(here, "exit.json"),
        {
            "returncode": returncode if returncode >= 0 else None,
            "signal": -returncode if returncode < 0 else None,
            "ended_at": time.time(),
            "stopped": os.path.exists(os.path.join(here, "stop")),
            "alone": kept.reason,
        },
    )


def _takes_pipes(folder):
    """Whether a named pipe can be made in a folder. On exFAT, NTFS and a /mnt of WSL2 it cannot, and torch, told to make one there, ends the
    process (ProcessGroupNCCL.hpp, DumpPipe)."""
    probe = os.path.join(folder, "pipe-%d.probe" % os.getpid())
    try:
        os.mkfifo(probe)
        os.unlink(probe)
    except OSError:
        return False
    return True


def _write(path, value):
    try:
        files.write_json(path, value)
    except OSError as error:
        sys.exit(error.errno or 1)


def remove_secrets(folder):
    """Take the run's secrets from the disk: nobody needs them any more."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, "secrets.json"))


def mark_stop(request):
    """Write down that a stop is meant, before anything is signalled: ranks whose peers were stopped first will fail.

    `request`: workdir, run, node, and what `claims.stopping` tells a stop by hand from that of a recovery.
    """
    with claims.stopping(request):
        here = _unfinished(request)
        if here is not None:
            files.write_json(os.path.join(here, "stop"), {"time": time.time()})
    return {"marked": here is not None}


def stop(request):
    """End a run on this node and verify that nothing of it is left. Idempotent; a run this node does not know is stopped.

    A full disk is no reason to let it run: what cannot be written then is left out. "made_in": the workdir in which the run's
    folder was made here, where that may be another one than today's. "as_nodes": the names under which this machine has taken part
    in the run.
    """
    frozen = None
    try:
        with contextlib.suppress(OSError):
            mark_stop(request)
    except claims.RefusedError as error:
        if error.kind != "frozen" or not request.get("by_hand"):
            raise
        frozen = error
    outcome = _stop_everywhere(request)
    if frozen is not None:  # what ran is ended all the same, and what the frozen one was about to start is not prevented
        raise frozen
    return outcome


def _stop_everywhere(request):
    outcome = _stop(request)
    made_in = request.get("made_in")
    if made_in and os.path.realpath(paths.expand(made_in)) != os.path.realpath(paths.expand(request["workdir"])):
        moved = dict(request, workdir=made_in)
        if os.path.isdir(paths.run_dir(made_in, request["run"])):
            with contextlib.suppress(OSError):
                mark_stop(moved)
        there = _stop(moved)
        sums = {key: there[key] + value for key, value in outcome.items()}
        return dict(sums, as_nodes=outcome["as_nodes"] or there["as_nodes"])  # who is known here is not somebody else there, too
    return outcome


def _stop(request):
    run, folder = paths.checked(request["run"]), paths.run_dir(request["workdir"], request["run"])
    node, grace_s = paths.checked(request["node"]), float(request.get("grace_s", 8.0))
    outcome = processes.end_run(run, request["workdir"], node, grace_s=grace_s, ranks=records.rank_pids(folder))
    if outcome["asked"]:
        load.wait_for_cards()
    remove_secrets(folder)
    here = _unfinished(request)
    if here is not None:
        # The watcher itself had to be killed, or was gone before: write the end in its place.
        end = {"returncode": None, "signal": int(signal.SIGKILL), "ended_at": time.time(), "stopped": True}
        with contextlib.suppress(OSError):
            files.write_json(os.path.join(here, "exit.json"), end)
    names = [paths.names_here(folder, number) for number in paths.attempts(folder)]
    # Where nodes share a disk all their names are there, and this machine speaks for its own.
    own = {name for found in names for name in found if len(found) == 1 or name == request["node"]}
    return dict(outcome, as_nodes=sorted(own))


def undo(request):
    """A start that did not come to its end on all nodes: end what it has begun here, and nothing of anybody else."""
    if claims.undo(request):
        return stop({key: value for key, value in request.items() if key != "token"})
    return {"asked": 0, "killed": 0, "left": []}


def _unfinished(request):
    """This node's folder of the newest attempt, when it was begun here and has not written how it ended; else None."""
    folder = paths.run_dir(request["workdir"], request["run"])
    newest = (paths.attempts(folder) or [None])[-1]
    if newest is None:
        return None
    here = paths.node_dir(folder, newest, paths.name_here(folder, newest, request["node"]))
    return here if os.path.isdir(here) and not os.path.exists(os.path.join(here, "exit.json")) else None
