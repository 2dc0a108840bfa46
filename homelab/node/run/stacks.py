"""The stacks of each rank of this node before it is ended, as Python, the cards and NCCL report them.

The workers write the stacks of their threads when they get SIGUSR1 (`homelab.worker.training.train`); NCCL's flight recorder writes its file when
something comes through its pipe (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, DumpPipe; never run here on a card).
"""

from __future__ import annotations

import glob
import os
import signal
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records
from homelab.node.system import processes, programs
from homelab.shared.protocol import files
from homelab.shared.protocol.run_messages import Stacks

if TYPE_CHECKING:
    from homelab.shared.protocol.request import RunRequest

_WAIT_S = 1.0
_DUMP_WAIT_S = 3.0  # its thread looks once a second
_CARDS_S = 5.0
_LINES = 200


def stacks(request: RunRequest) -> Stacks:
    """{"ranks": {rank: [lines]}, "cards": [lines of nvidia-smi], "dumps": [files of NCCL's flight recorder on this node]}.

    Of the newest attempt; no lines for a rank that cannot answer (frozen, or gone).
    """
    folder = paths.run_dir(request.workdir, request.run)
    attempt = paths.newest_attempt(folder)
    node = paths.name_here(folder, attempt, request.node)
    pids = processes.of_run(request.run, request.workdir, node)
    sizes_before = {}
    for rank in attempt_records.plan(folder, attempt)["ranks"]:
        home = os.path.join(paths.attempt_dir(folder, attempt), "ranks", str(rank["rank"]))
        file = os.path.join(home, "stacks.txt")
        beat = files.read_object(os.path.join(home, "heartbeat.json")) or {}
        # Only a worker of this run that has made the file handles the signal: it would end any other program.
        if rank["node"] == node and beat.get("pid") in pids and os.path.exists(file):
            sizes_before[int(rank["rank"])] = (file, os.path.getsize(file))
            try:
                os.kill(beat["pid"], signal.SIGUSR1)
            except OSError:
                continue
    node_dir = paths.node_dir(folder, attempt, node)
    pipes = _ask_nccl(node_dir)
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline and any(os.path.getsize(file) <= before for file, before in sizes_before.values()):
        time.sleep(0.02)
    cards = _cards()
    deadline = time.monotonic() + (_DUMP_WAIT_S if pipes else 0.0)
    while time.monotonic() < deadline and len(_dumps(node_dir)) < pipes:
        time.sleep(0.05)
    return Stacks(
        ranks={
            rank: tuple(files.tail(file, _LINES)) if os.path.getsize(file) > before else () for rank, (file, before) in sizes_before.items()
        },
        cards=tuple(cards),
        dumps=tuple(_dumps(node_dir)),
    )


def _cards() -> list[str]:
    """What nvidia-smi shows; [] where there is none, and one line where it does not answer: then the driver hangs, too."""
    program = programs.path_of("nvidia-smi")
    if program is None:
        return []
    try:
        return programs.answer_of([program], _CARDS_S)[1].splitlines()
    except (OSError, TimeoutError) as error:
        return [f"nvidia-smi: {error}"]


def _ask_nccl(node_dir: str) -> int:
    """Ask every flight recorder for its file; how many could be asked (a pipe without a reader belongs to a process that is gone)."""
    pipes = 0
    for pipe in glob.glob(os.path.join(glob.escape(node_dir), "nccl-dump-*.pipe")):
        try:
            descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.write(descriptor, b"1\n")
            pipes += 1
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return pipes


def _dumps(node_dir: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(node_dir), "nccl-trace-*")))
