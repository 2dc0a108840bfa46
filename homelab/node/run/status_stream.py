"""Follow one attempt on this node: a line at every change, and one a second as a sign of life. Files and /proc only, no programs; those that tell
of the node's owner are asked by a thread of their own (`homelab.node.run.house_watch`).

Ages are counted by this process's own monotonic clock: a wall clock that jumps by an hour says nothing about a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.run import attempt_records, ownership
from homelab.node.run.house_watch import HouseWatch
from homelab.node.run.peer_probe import Peers
from homelab.node.system import process_activity, processes
from homelab.node.system.boot_clock import boot_id
from homelab.shared.protocol import files, manifest, message, phases
from homelab.shared.protocol.rank_messages import DEAD, RankStatus
from homelab.shared.protocol.run_messages import StatusLine

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.run_requests import FollowRequest

INTERVAL_S = 0.1
BEAT_S = 1.0


def follow(request: FollowRequest) -> None:
    """Print JSON lines (`run_messages.StatusLine`) until stdin closes.

    Lines that come in are the asker's signs of life (`homelab.node.run.isolation_guard`, `homelab.node.run.ownership`).
    """
    follower = StatusFollower(request.workdir, request.run, request.attempt, request.node)
    ear = ownership.Ear(follower.folder, request)
    ended = threading.Event()

    def listen() -> None:
        while sys.stdin.buffer.readline():  # each line shows that the follower is alive
            hear(follower.here)
            ear.hear()
        ear.leave()
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    peers = Peers(follower.peers)
    before, said_at = None, -BEAT_S
    with HouseWatch(request, follower.folder, request.attempt, follower.here) as house:
        while not ended.is_set():
            status = follower.look(time.monotonic())
            house.hear(status.ranks)
            status = status.replace(missing_s=peers.look(status.ranks, time.monotonic()), house=house.seen)
            essence = _essence(status)
            if essence != before or time.monotonic() - said_at >= BEAT_S:
                try:
                    print(json.dumps(status, default=message.fields), flush=True)
                except OSError:  # the follower is gone
                    return
                before, said_at = essence, time.monotonic()
            ended.wait(INTERVAL_S)


def _essence(status: StatusLine) -> StatusLine:
    """Without what changes by itself: ages."""
    return status.replace(ranks={rank: entry.replace(still_s=0.0, step_still_s=0.0) for rank, entry in status.ranks.items()}, missing_s={})


class StatusFollower:
    """What is there of one attempt; remembers since when each rank has given no sign (`still_s`) and has done no step (`step_still_s`).

    Signs are beats, which come with every pass, and work that is seen where a rank says nothing for long.
    """

    def __init__(self, workdir: str, run: str, attempt: int, node: str) -> None:
        self.folder = paths.run_dir(workdir, run)
        self.attempt = attempt
        node = paths.name_here(self.folder, attempt, node)
        self.here = paths.node_dir(self.folder, attempt, node)
        plan = attempt_records.plan(self.folder, attempt)
        self.peers = {entry["name"]: entry["lan_address"] for entry in plan["nodes"] if entry["name"] != node}
        self.ranks = [int(rank["rank"]) for rank in plan["ranks"] if rank["node"] == node]
        self.planned_s = plan["step_s"]
        self._beats: dict[int, tuple[Any, float]] = {}
        self._steps: dict[int, tuple[Any, float]] = {}
        self._work = {rank: process_activity.Work() for rank in self.ranks}
        self._boot_id = boot_id()

    def look(self, now_s: float) -> StatusLine:
        """One sign. `now_s` is monotonic."""
        agent = attempt_records.agent(self.here) or {}
        if agent.get("boot_id") not in (None, "", self._boot_id):  # a pid from before a power cut belongs to another process, or to none
            agent = dict(agent, pid=None, torchrun_pid=None)
        return StatusLine(
            attempt=self.attempt,
            newest=paths.newest_attempt(self.folder),
            started=bool(agent),
            stopping=os.path.exists(os.path.join(self.here, "stop")),
            agent=processes.state(agent.get("pid")),
            torchrun=processes.state(agent.get("torchrun_pid")),
            exit=message.as_written(files.read_object(os.path.join(self.here, "exit.json"))),
            checkpoint=(manifest.steps(self.folder) or [0])[-1],
            ranks={rank: self._rank(rank, now_s, has_booted=bool(agent) and agent["pid"] is None) for rank in self.ranks},
        )

    def _rank(self, rank: int, now_s: float, has_booted: bool) -> RankStatus:
        home = os.path.join(paths.attempt_dir(self.folder, self.attempt), "ranks", str(rank))
        beat, state = _last_word(os.path.join(home, "heartbeat.json"))
        phase, step = beat.get("phase"), beat.get("step")
        # A heartbeat is new when its content differs, whatever its time: the node's clock may jump.
        place = (beat.get("pid"), phase, step)
        mark = (*place, beat.get("passes"), beat.get("time"))
        if self._steps.get(rank, (None, 0.0))[0] != place:
            self._steps[rank] = (place, now_s)
        if self._beats.get(rank, (None, 0.0))[0] != mark or self._works(rank, phase, beat.get("pid"), now_s):
            self._beats[rank] = (mark, now_s)
        return RankStatus(
            pid=beat.get("pid") if isinstance(beat.get("pid"), int) else None,
            state="" if has_booted else state,
            phase=phase if isinstance(phase, str) and phase else "absent",
            step=step if isinstance(step, int) else 0,
            still_s=round(now_s - self._beats[rank][1], 2),
            step_still_s=round(now_s - self._steps[rank][1], 2),
            error=os.path.exists(os.path.join(home, "error.json")),
        )

    def _works(self, rank: int, phase: Any, pid: Any, now_s: float) -> bool:
        return phase in phases.OBSERVED_BY_PROCESS and isinstance(pid, int) and self._work[rank].look(pid, now_s)


def _last_word(path: str) -> tuple[JsonObject, str]:
    """A rank's heartbeat and the state of its process. Who is dead has nothing more to say: its beat is read after its end is seen.

    Read before, the beat of a rank that says "done" and ends between the two looks is that of one that died at its work.
    """
    beat = files.read_object(path) or {}
    while True:
        state = processes.state(beat.get("pid"))
        if state not in DEAD:
            return beat, state
        again = files.read_object(path) or {}
        if again == beat:
            return beat, state
        beat = again


def hear(node_dir: str) -> None:
    """Write down that the one who follows has just spoken: by the machine's monotonic clock, because its wall clock may jump."""
    path = os.path.join(node_dir, "heard")
    with contextlib.suppress(OSError):  # a full disk; then only the steps count
        with open(path + ".partial", "w") as stream:
            stream.write(repr(time.monotonic()))
        os.replace(path + ".partial", path)


def last_heard_s(node_dir: str) -> float:
    """When `hear` was called last; 0 for never."""
    try:
        return float(files.text(os.path.join(node_dir, "heard")))
    except ValueError:
        return 0.0
