"""Processes that wait to go on with a run: after the first steps of an attempt a node prepares those of the next one, so that a fault need not wait for imports.

One holder for each attempt, the agent's detached part of an attempt to come. It holds one `rank_launcher` with as many ranks as this node has. They
have done the imports of this run, know no attempt yet, and use no card. `take` hands them the next attempt, and the holder becomes its watcher.

A supervisor that is about to take a node back asks for one (`prepare`), also of a node on which no attempt runs.

A holder ends by itself: when the run is done, when its attempt has ended and none followed for a while, when its run's folder or its ranks are gone,
and where memory becomes short. A stop by hand ends it with everything else; a recovery's own stop leaves it alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from types import MappingProxyType
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import claims, status_stream
from homelab.node.system import control_group, processes, programs
from homelab.shared.protocol import files, layout, phases, waiting_mark
from homelab.shared.protocol.run_messages import Preparation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.request import RunRequest

RECORD, GO = "standby.json", "go.json"  # in the node's folder of the attempt that it stands by for
WANTED = "standby-wanted"  # beside them: how often one was begun because a supervisor asked, which touches it
_MOST_BEGUN = 3
_MOST_BEFORE = 50  # attempts: where nodes share a disk, they have made some without this one
_LOOK_S = 1.0
_AGAIN_S, _AGAIN_MOST_S = 60.0, 3600.0
# Variables that are read when a process joins its group, or later: all others have to be the same, because imports have read them.
_LATE = ("HOMELAB_", "MASTER_", "NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_FR_")


class Preparing:
    """A context manager around an attempt that is watched: starts the holder of the next one when this one trains, where the node has the memory for it.

    One that ends is replaced, and memory that was short is looked at again: after a minute, then after twice the time, up to an hour.
    """

    def __init__(self, plan: JsonObject, folder: str, node_dir: str) -> None:
        self._plan, self._node_dir = plan, node_dir
        self._workdir = os.path.dirname(os.path.dirname(folder))
        self._follower = status_stream.StatusFollower(self._workdir, plan["run"], plan["attempt"], plan["node"])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._prepare, args=(folder,), daemon=True, name="standby")

    def __enter__(self) -> Preparing:
        if self._plan.get("standby_after_s") is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _prepare(self, folder: str) -> None:
        if not self._trains():
            return
        pause_s, wait_s, run = _AGAIN_S, self._plan["standby_after_s"], self._plan["run"]
        while not self._ended.wait(wait_s):
            wait_s = pause_s
            if holder(folder, self._node_dir) is not None:
                continue
            # A machine that slept meanwhile, or was frozen, awakes in the wait, and its ranks have no peers any more: they make one more step.
            if not self._trains():
                return
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)
            try:
                with claims.locked(self._workdir):  # a supervisor may ask for one in this moment
                    if not self._ended.is_set() and not _is_stopped(self._workdir, run) and holder(folder, self._node_dir) is None:
                        _begin(folder, self._node_dir, len(self._follower.ranks))
            except (OSError, claims.RefusedError) as error:
                print(f"no standby: {error}", flush=True)

    def _trains(self) -> bool:
        """Wait until each rank has made a step; False where the attempt has ended first."""
        first: dict[int, int] = {}
        while not self._ended.wait(_LOOK_S):
            ranks = self._follower.look(time.monotonic()).ranks
            for number, rank in ranks.items():
                if rank.phase == phases.TRAINING:
                    first.setdefault(number, rank.step)
            if ranks and all(number in first and rank.step > first[number] for number, rank in ranks.items()):
                return True
        return False


def prepare(request: RunRequest) -> Preparation:
    """Begin, or keep, the processes that wait for the next attempt here, whether one runs here now or not. Asked again and again while they are wanted.

    Raises claims.RefusedError where a frozen process keeps the lock.
    """
    folder = paths.run_dir(request.workdir, request.run)
    try:
        # A stop by hand comes before, and is seen, or after, and ends it; a start takes what is begun here, or is the newest attempt.
        with claims.locked(request.workdir):
            start, node_dir = _last_start(folder, layout.checked(request.node))
            if start.get("standby_after_s") is None or not start.get("program"):
                return Preparation(state="none")
            wanted = os.path.join(node_dir, WANTED)
            times = len(files.text(wanted))
            if holder(folder, node_dir) is None:
                if times >= _MOST_BEGUN or _is_stopped(request.workdir, request.run):
                    return Preparation(state="none")
                own = {
                    "HOMELAB_RUN": request.run,
                    "HOMELAB_NODE": start["node"],
                    "HOMELAB_ATTEMPT": str(start["attempt"]),
                    "HOMELAB_RUN_DIR": folder,
                }
                _begin(folder, node_dir, len(start["ranks"]), own)
                times += 1
            with open(wanted, "w", encoding="utf-8") as file:
                file.write("." * times)
    except OSError:  # memory or a disk: the next attempt begins slower, and that is all
        return Preparation(state="none")
    pids = processes.of_run(request.run, request.workdir, request.node, standbys=True)
    waiting = [pid for pid in pids if files.text(f"/proc/{pid}/comm") == waiting_mark.WAITS]
    return Preparation(state="ready" if len(waiting) >= len(start["ranks"]) else "begun")


def _last_start(folder: str, node: str) -> tuple[JsonObject, str]:
    """start.json of the newest attempt in which this node took part, and its folder of it; ({}, "") where it took part in none."""
    for number in paths.attempts(folder):
        node_dir = paths.node_dir(folder, number, paths.name_here(folder, number, node))
        start = files.read_object(os.path.join(node_dir, layout.START_JSON))
        if start is not None:
            return start, node_dir
    return {}, ""


def _is_stopped(workdir: str, run: str) -> bool:
    """By hand, in its newest attempt."""
    return claims.stopped_attempt(workdir, run) == paths.newest_attempt(paths.run_dir(workdir, run))


def holder(folder: str, node_dir: str) -> int | None:
    """The one that stands by for the attempt of `node_dir`; None where none lives."""
    pid = (files.read_object(os.path.join(node_dir, RECORD)) or {}).get("pid")
    return pid if isinstance(pid, int) and processes.is_alive(pid) and processes.run_of(pid) == os.path.basename(folder) else None


def _begin(folder: str, node_dir: str, ranks: int, own: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start a holder, under the lock of the claims. `own`: variables of the run that this process lacks. Raises OSError where memory or the disk refuses."""
    needed = waiting_mark.RANK_BYTES * ranks
    if control_group.available_bytes() < needed:
        raise OSError(f"this node has less than {needed >> 30} GiB of free memory")
    environment = {**os.environ, **own, waiting_mark.VARIABLE: "1"}
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(node_dir, GO))  # of one before
    with open(os.path.join(node_dir, "standby.log"), "ab") as log:
        child = programs.detached([sys.executable, "-m", "homelab.node", "standby", node_dir], folder, environment, log)
    # By this process: when the lock is free, who looks sees it.
    plan = files.read_json(os.path.join(node_dir, layout.START_JSON))
    files.write_json(os.path.join(node_dir, RECORD), {"pid": child.pid, "fits": fits(plan)})


def fits(start: JsonObject) -> JsonObject:
    """What of start.json has to be the same for a process that has done its imports."""
    environment = {name: value for name, value in start["environment"].items() if not name.startswith(_LATE)}
    return {"program": list(start["program"]), "environment": environment, "ranks": len(start["ranks"])}


class ToldHolder:
    """One that was told to go on, for who waits for it as for a child."""

    returncode = 1

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """None while it lives."""
        return None if processes.is_alive(self.pid) else self.returncode


def take(folder: str, start: JsonObject, node_dir: str) -> ToldHolder | None:
    """Hand the attempt of start.json (`start`), whose folder is `node_dir`, to the processes that wait; None where none are there that fit."""
    before = (number for number in paths.attempts(folder) if number < start["attempt"])
    for number in itertools.islice(before, _MOST_BEFORE):
        waiting_dir = paths.node_dir(folder, number, paths.name_here(folder, number, start["node"]))
        record = files.read_object(os.path.join(waiting_dir, RECORD))
        if record is None:
            continue
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(waiting_dir, RECORD))
        pid = record.get("pid")
        if not isinstance(pid, int) or not processes.is_alive(pid) or processes.run_of(pid) != start["run"]:
            return None
        if record.get("fits") != fits(start):
            processes.signal_all([pid], signal.SIGTERM)
            return None
        go = {"pid": pid, "attempt": start["attempt"], "node": start["node"], "node_dir": node_dir}
        files.write_json(os.path.join(waiting_dir, GO), go)
        return ToldHolder(pid)
    return None
