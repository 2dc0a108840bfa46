"""`python -m homelab.node ranks`: starts and watches the ranks of this node in place of torchrun, whose own imports take seconds of every recovery.

Same variables, same files of output, same words at the end (torch/distributed/elastic/agent/server/api.py, multiprocessing/errors/__init__.py of torch
2.13), so that a reader of a run need not know which of the two has started it. Rank 0 holds the store at which the ranks meet, not this program.

It reads two JSON lines. The first says what to start, and its ranks do their imports and wait (`homelab.worker.runtime.waiting_rank`). The second says
which attempt they are to be ranks of. Where the first is null, nothing waits: a rank starts when the second line comes. Without a second line it ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from homelab.node.run import attempt_records
from homelab.node.system import processes
from homelab.shared.protocol import files, layout, waiting_mark

if TYPE_CHECKING:
    from typing import BinaryIO

    from homelab.shared.protocol.files import JsonObject

GRACE_S = 30.0  # torchrun's (elastic/multiprocessing/api.py, PContext.close)
_LOOK_S = 0.05
_MOST_STARTS = 3  # of one rank that waits and dies


def spawn(folder: str, log: BinaryIO, waiting: JsonObject | None = None) -> subprocess.Popen[bytes]:
    """Start it in a session of its own. `waiting`: {"program", "environment", "ranks"} of ranks that do their imports now. Raises OSError."""
    command = [sys.executable, "-m", "homelab.node", "ranks"]
    child = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    tell(child, waiting)
    return child


def begin(line: JsonObject, waiting: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    """Let the ranks of `order` begin: those that wait or, where none do or they are gone, new ones. Raises OSError."""
    if waiting is not None and waiting.poll() is None:
        with contextlib.suppress(OSError):
            tell(waiting, line)
            return waiting
    with open(line["err"], "ab") as log:
        child = spawn(line["folder"], log)
    tell(child, line)
    return child


def tell(child: subprocess.Popen[bytes], line: JsonObject | None) -> None:
    """Give it its next line. Raises OSError where it is gone."""
    assert child.stdin is not None
    child.stdin.write(json.dumps(line).encode() + b"\n")
    child.stdin.flush()


def of_group(plan: JsonObject, folder: str) -> dict[str, str]:
    """torchrun's variables that all ranks of this node have, in the attempt of start.json (`plan`)."""
    attempt = attempt_records.plan(folder, int(plan["attempt"]))
    written = files.read_object(os.path.join(folder, layout.plan_json(int(plan["attempt"])))) or {}
    nodes, here = [node["name"] for node in attempt["nodes"]], [rank for rank in attempt["ranks"] if rank["node"] == plan["node"]]
    said = {
        "WORLD_SIZE": len(attempt["ranks"]), "LOCAL_WORLD_SIZE": len(here), "GROUP_RANK": nodes.index(plan["node"]), "GROUP_WORLD_SIZE": len(nodes),
        "MASTER_ADDR": written.get("master_address"), "MASTER_PORT": written.get("master_port"),
    }  # fmt: skip
    if len(here) > 1:
        said["OMP_NUM_THREADS"] = plan["environment"].get("OMP_NUM_THREADS", 1)  # as torchrun does (torch/distributed/run.py)
    return {name: str(value) for name, value in said.items()}


def order(plan: JsonObject, environment: dict[str, str], folder: str, node_dir: str) -> JsonObject:
    """The second line: the ranks of this node in the attempt of start.json (`plan`)."""
    logs = os.path.join(node_dir, "logs", f"{plan['run']}-{plan['attempt']}", "attempt_0")
    return {
        "program": plan["program"], "environment": {**environment, **of_group(plan, folder)}, "folder": folder,
        "ranks": [{**rank, "logs": os.path.join(logs, str(rank["local_rank"]))} for rank in plan["ranks"]],
        "out": os.path.join(node_dir, "out.log"), "err": os.path.join(node_dir, "err.log"),
    }  # fmt: skip


def of_rank(line: JsonObject, rank: JsonObject) -> dict[str, str]:
    """The whole environment of one rank of a line."""
    return {**line["environment"], "RANK": str(rank["rank"]), "LOCAL_RANK": str(rank["local_rank"])}


def main() -> int:
    """Returns torchrun's exit codes: 0 when every rank ended well, 1 otherwise."""
    lines = io.FileIO(0, closefd=False)  # a buffer would take the second line with the first, and select(2) would not see it
    first = json.loads(lines.readline() or b"null")
    waiting = _wait(first) if first else {}
    line = lines.readline()
    if not line:
        _end(list(waiting.values()), 0.0)
        return 0
    processes.rename(waiting_mark.AT_WORK)
    said: JsonObject = json.loads(line)
    redirect(said["out"], said["err"])
    children: dict[int, subprocess.Popen[bytes]] = {}

    def leave(*_: object) -> NoReturn:
        _end(list(children.values()), GRACE_S)
        os._exit(1)

    signal.signal(signal.SIGTERM, leave)
    for rank in said["ranks"]:
        children[rank["rank"]] = _begin(said, rank, waiting.pop(rank["local_rank"], None))
    _end(list(waiting.values()), 0.0)  # of a card that takes no part any more
    return _watch(children, {rank["rank"]: rank["local_rank"] for rank in said["ranks"]})


def _wait(first: JsonObject) -> dict[int, subprocess.Popen[bytes]]:
    """Start the ranks that wait; return when the next line is there. One that dies meanwhile is started again, not for ever."""
    children: dict[int, subprocess.Popen[bytes]] = {}
    starts = {rank["local_rank"]: (rank, 0) for rank in first["ranks"]}
    while True:
        for number, (rank, times) in starts.items():
            if (number not in children or children[number].poll() is not None) and times < _MOST_STARTS:
                starts[number] = (rank, times + 1)
                children[number] = subprocess.Popen(first["program"], env=of_rank(first, rank), stdin=subprocess.PIPE)
        if select.select([0], [], [], 1.0)[0]:
            return children


def _begin(said: JsonObject, rank: JsonObject, waiting: subprocess.Popen[bytes] | None) -> subprocess.Popen[bytes]:
    """Let the one that waits be this rank, or start it where none does."""
    os.makedirs(rank["logs"], exist_ok=True)
    out, err = (os.path.join(rank["logs"], f"{name}.log") for name in ("stdout", "stderr"))
    environment = of_rank(said, rank)
    if waiting is not None:
        with contextlib.suppress(OSError):
            tell(waiting, {"environment": environment, "out": out, "err": err})
            assert waiting.stdin is not None
            waiting.stdin.close()
            return waiting
    with open(out, "ab") as own_out, open(err, "ab") as own_err:
        return subprocess.Popen(
            said["program"], cwd=said["folder"], env=environment, stdin=subprocess.DEVNULL, stdout=own_out, stderr=own_err
        )


def redirect(out: str, err: str | None = None) -> None:
    """From now on this process writes into these files; into one for both without the second."""
    for path, number in ((out, 1), (err or out, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _watch(children: dict[int, subprocess.Popen[bytes]], local: dict[int, int]) -> int:
    """Until all have ended well, or one has not: the others end then, too. `local`: rank -> its number on this node."""
    while True:
        failed = {rank: child for rank, child in children.items() if child.poll() not in (None, 0)}
        if failed:
            failed_at = time.time()
            _end([child for child in children.values() if child.poll() is None], GRACE_S)
            _say_failed(failed, failed_at, local)
            return 1
        if all(child.poll() == 0 for child in children.values()):
            return 0
        time.sleep(_LOOK_S)


def _say_failed(failed: dict[int, subprocess.Popen[bytes]], failed_at: float, local: dict[int, int]) -> None:
    """In the form of torch.distributed.elastic's ChildFailedError; the first that was seen is the root."""
    when = time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(failed_at))
    entries = []
    for number, (rank, child) in enumerate(failed.items()):
        code = child.returncode
        words = f"{signal.strsignal(-code)} (signal {-code}) received by PID {child.pid}" if code < 0 else "see its stderr.log"
        entries.append(
            f"[{number}]:\n  time      : {when}\n  host      : {socket.gethostname()}\n  rank      : {rank} (local_rank: {local[rank]})\n"
            f"  exitcode  : {code} (pid: {child.pid})\n  error_file: <N/A>\n  traceback : {words}"
        )
    first, *others = entries
    text = [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        "the ranks of this node FAILED",
        "-" * 60,
        "Failures:",
    ]
    text += [*(others or ["  <NO_OTHER_FAILURES>"]), "-" * 60, "Root Cause (first observed failure):", first, "=" * 60]
    print("\n".join(text), file=sys.stderr, flush=True)


def _end(children: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
