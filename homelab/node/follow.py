"""Follow one attempt on this node: a line at every change, and one a second as a sign of life. Files and /proc only, no programs.

Ages are counted by this process's own monotonic clock: a wall clock that jumps by an hour says nothing about a rank.
"""

import contextlib
import json
import os
import sys
import threading
import time

from homelab.node import files, paths, processes, records, work
from homelab.node.claims import boot_id
from homelab.node.peers import Peers

INTERVAL_S = 0.1
BEAT_S = 1.0
_AGES = frozenset(("still_s", "step_still_s"))
_DEAD = frozenset(("", "Z", "X"))
# A rank says nothing there for minutes while it is well: its process is looked at.
_WORKS_UNSEEN = frozenset(("starting", "loading", "fetching", "saving"))


def follow(request):
    """Print JSON lines (types: `homelab.runs.signs.Sign`) until stdin closes. `request`: workdir, node, run, attempt.

    Lines that come in are the asker's signs of life (`homelab.node.guard`).
    """
    here = Follower(request["workdir"], request["run"], int(request["attempt"]), request["node"])
    ended = threading.Event()

    def listen():
        while sys.stdin.buffer.readline():  # each line is the word of somebody who is still there
            hear(here.here)
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    peers = Peers(here.peers)
    before, said_at = None, -BEAT_S
    while not ended.is_set():
        seen = here.look(time.monotonic())
        seen["missing_s"] = peers.look(seen["ranks"], time.monotonic())
        essence = _essence(seen)
        if essence != before or time.monotonic() - said_at >= BEAT_S:
            try:
                print(json.dumps(seen), flush=True)
            except OSError:  # nobody listens any more
                return
            before, said_at = essence, time.monotonic()
        ended.wait(INTERVAL_S)


def _essence(seen):
    ranks = {rank: {key: value for key, value in entry.items() if key not in _AGES} for rank, entry in seen["ranks"].items()}
    return dict(seen, ranks=ranks, missing_s=None)


class Follower:
    """What is there of one attempt; remembers since when each rank has given no sign (`still_s`) and has done no step (`step_still_s`).

    Signs are beats, which come with every pass, and work that is seen where a rank says nothing for long.
    """

    def __init__(self, workdir, run, attempt, node):
        self.folder = paths.run_dir(workdir, run)
        self.attempt = attempt
        node = paths.name_here(self.folder, attempt, node)
        self.here = paths.node_dir(self.folder, attempt, node)
        plan = records.plan(self.folder, attempt)
        self.peers = {entry["name"]: entry["lan_address"] for entry in plan["nodes"] if entry["name"] != node}
        self.ranks = [str(rank["rank"]) for rank in plan["ranks"] if rank["node"] == node]
        self.planned_s = plan["step_s"]
        self._beats = {}
        self._steps = {}
        self._work = {rank: work.Work() for rank in self.ranks}
        self._boot_id = boot_id()

    def look(self, now_s):
        """One sign. `now_s` is monotonic."""
        agent = records.agent(self.here) or {}
        if agent.get("boot_id") not in (None, "", self._boot_id):  # a pid from before a power cut is somebody else's, or nobody's
            agent = dict(agent, pid=None, torchrun_pid=None)
        return {
            "attempt": self.attempt,
            "newest": (paths.attempts(self.folder) or [0])[-1],
            "started": bool(agent),
            "stopping": os.path.exists(os.path.join(self.here, "stop")),
            "agent": processes.state(agent.get("pid")),
            "torchrun": processes.state(agent.get("torchrun_pid")),
            "exit": files.read_object(os.path.join(self.here, "exit.json")),
            "checkpoint": (files.checkpoint_steps(self.folder) or [0])[-1],
            "ranks": {rank: self._rank(rank, now_s, has_booted=bool(agent) and agent["pid"] is None) for rank in self.ranks},
        }

    def _rank(self, rank, now_s, has_booted):
        home = os.path.join(paths.attempt_dir(self.folder, self.attempt), "ranks", rank)
        beat, state = _last_word(os.path.join(home, "heartbeat.json"))
        phase, step = beat.get("phase"), beat.get("step")
        # A beat is told from the last one by what it says, not by its time: the node's clock may jump.
        place = (beat.get("pid"), phase, step)
        mark = (*place, beat.get("passes"), beat.get("time"))
        if self._steps.get(rank, (None, 0.0))[0] != place:
            self._steps[rank] = (place, now_s)
        if self._beats.get(rank, (None, 0.0))[0] != mark or self._works(rank, phase, beat.get("pid"), now_s):
            self._beats[rank] = (mark, now_s)
        return {
            "pid": beat.get("pid") if isinstance(beat.get("pid"), int) else None,
            "state": "" if has_booted else state,
            "phase": phase if isinstance(phase, str) and phase else "absent",
            "step": step if isinstance(step, int) else 0,
            "still_s": round(now_s - self._beats[rank][1], 2),
            "step_still_s": round(now_s - self._steps[rank][1], 2),
            "error": os.path.exists(os.path.join(home, "error.json")),
        }

    def _works(self, rank, phase, pid, now_s):
        return phase in _WORKS_UNSEEN and isinstance(pid, int) and self._work[rank].look(pid, now_s)


def _last_word(path):
    """A rank's heartbeat and the state of its process. Who is dead has nothing more to say: its beat is read after its end is seen.

    Read before, the beat of a rank that says "done" and ends between the two looks is that of one that died at its work.
    """
    beat = files.read_object(path) or {}
    while True:
        state = processes.state(beat.get("pid"))
        if state not in _DEAD:
            return beat, state
        again = files.read_object(path) or {}
        if again == beat:
            return beat, state
        beat = again


def hear(node_dir):
    """Write down that the one who follows has just spoken: by the machine's monotonic clock, because its wall clock may jump."""
    path = os.path.join(node_dir, "heard")
    with contextlib.suppress(OSError):  # a full disk; then the steps alone count
        with open(path + ".partial", "w") as stream:
            stream.write(repr(time.monotonic()))
        os.replace(path + ".partial", path)


def last_heard_s(node_dir):
    """When `hear` was called last; 0 for never."""
    try:
        with open(os.path.join(node_dir, "heard")) as stream:
            return float(stream.read())
    except (OSError, ValueError):
        return 0.0
