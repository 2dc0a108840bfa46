"""Where each rank of this node stands, before it is ended: what Python, the cards and NCCL say of it.

The workers write the stacks of their threads when they get SIGUSR1 (`homelab.worker.train`); NCCL's flight recorder writes its file when
something comes through its pipe (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe; never run here on a card).
"""

import glob
import os
import signal
import time

from homelab.node import files, paths, processes, programs, records

_WAIT_S = 1.0
_DUMP_WAIT_S = 3.0  # its thread looks once a second
_CARDS_S = 5.0
_LINES = 200


def stacks(request):
    """{"ranks": {rank: [lines]}, "cards": [lines of nvidia-smi], "dumps": [files of NCCL's flight recorder on this node]}.

    Of the newest attempt; no lines for a rank that cannot answer (frozen, or gone).
    """
    folder = paths.run_dir(request["workdir"], request["run"])
    attempt = (paths.attempts(folder) or [0])[-1]
    node = paths.name_here(folder, attempt, request["node"])
    pids = processes.of_run(request["run"], request["workdir"], node)
    asked = {}
    for rank in records.plan(folder, attempt)["ranks"]:
        home = os.path.join(paths.attempt_dir(folder, attempt), "ranks", str(rank["rank"]))
        file = os.path.join(home, "stacks.txt")
        beat = files.read_object(os.path.join(home, "heartbeat.json")) or {}
        # Only a worker of this run that has made the file handles the signal: it would end any other program.
        if rank["node"] == node and beat.get("pid") in pids and os.path.exists(file):
            asked[str(rank["rank"])] = (file, os.path.getsize(file))
            try:
                os.kill(beat["pid"], signal.SIGUSR1)
            except OSError:
                continue
    here = paths.node_dir(folder, attempt, node)
    pipes = _ask_nccl(here)
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and any(os.path.getsize(file) <= before for file, before in asked.values()):
        time.sleep(0.02)
    cards = _cards()
    deadline = time.monotonic() + (_DUMP_WAIT_S if pipes else 0.0)
    while time.monotonic() < deadline and len(_dumps(here)) < pipes:
        time.sleep(0.05)
    return {
        "ranks": {rank: files.tail(file, _LINES) if os.path.getsize(file) > before else [] for rank, (file, before) in asked.items()},
        "cards": cards,
        "dumps": _dumps(here),
    }


def _cards():
    """What nvidia-smi shows; [] where there is none, and one line where it does not answer: then the driver hangs, too."""
    program = programs.path_of("nvidia-smi")
    if program is None:
        return []
    try:
        return programs.answer_of([program], _CARDS_S)[1].splitlines()
    except (OSError, TimeoutError) as error:
        return ["nvidia-smi: %s" % error]


def _ask_nccl(here):
    """Ask every flight recorder for its file; how many could be asked (a pipe without a reader belongs to a process that is gone)."""
    asked = 0
    for pipe in glob.glob(os.path.join(glob.escape(here), "nccl-dump-*.pipe")):
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.write(descriptor, b"1\n")
            asked += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return asked


def _dumps(here):
    return sorted(glob.glob(os.path.join(glob.escape(here), "nccl-trace-*")))
