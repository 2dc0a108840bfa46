"""What a node does by itself while it trains: it stays awake, and it stops its ranks when it has lost the controller and all other nodes.

A rank that waits for lost peers holds its card for half an hour; a rank that was stopped by a signal holds it for ever. A node that a
supervisor still follows leaves the stop to the supervisor. A node that has lost only the controller (a laptop lid) trains on.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from homelab.node.run import status_stream
from homelab.node.system import processes, programs
from homelab.shared.protocol import phases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from homelab.shared.protocol.rank_messages import RankStatus

LOOK_S = 1.0
ALONE_S = 60.0
# A node at a tenth of its speed needs ten times as long for a step, and the other nodes wait without a sign.
STEP_FACTOR = 30.0
# Before the first timed step (kernels are compiled, caches are cold), and where one node may need long.
LIMITS_S = dict(phases.LIMITS_S, starting=1200.0, fetching=180.0)
FIRST_STEP_S = 600.0


def reason(unheard_s: float, ranks: Mapping[int, RankStatus], slowest_step_s: float | None, planned_s: float | None = None) -> str | None:
    """Why this node must stop its ranks, in words; None while it must not.

    `unheard_s`: seconds since the last word of the supervisor that follows the attempt, or since its start. `ranks`: `follow.Follower.look`'s.
    `slowest_step_s`: of those that were seen, None before the first; `planned_s`: how long the plan expects one to take, None where it
    does not know. A program without heartbeats is never stopped.
    """
    waiting = [rank for rank in ranks.values() if rank.phase not in ("absent", "done")]
    if not waiting or unheard_s < ALONE_S:
        return None
    if any(rank.still_s < _limit_s(rank.phase, slowest_step_s, planned_s) for rank in waiting):
        return None
    still_s = min(rank.still_s for rank in waiting)
    return f"no controller was heard for {unheard_s:.0f} s, and no rank did anything for {still_s:.0f} s: the other nodes are lost"


def _limit_s(phase: str, slowest_step_s: float | None, planned_s: float | None) -> float:
    if phase != "training":
        return LIMITS_S.get(phase, FIRST_STEP_S)
    if slowest_step_s is None:
        return max(FIRST_STEP_S, phases.FIRST_STEP_FACTOR * (planned_s or 0.0))
    return max(ALONE_S, STEP_FACTOR * slowest_step_s)


class Guard:
    """A context manager around one attempt. `reason` is set when the node has let go; the attempt's own processes are ended then."""

    def __init__(self, workdir: str, run: str, attempt: int, node: str) -> None:
        self.reason: str | None = None
        self._run, self._workdir, self._node = run, workdir, node
        self._follower = status_stream.StatusFollower(workdir, run, attempt, node)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="guard")
        self._steps: dict[int, tuple[int, float]] = {}  # rank -> (step, since when)
        self._warm: set[int] = set()  # ranks of which a step was seen to end
        # The first step that is seen may be the cold one, which takes many times as long: it counts while there is no other.
        self._first_step_s: float | None = None
        self._slowest_step_s: float | None = None
        self._began_s = time.monotonic()

    def __enter__(self) -> Guard:
        if self._follower.peers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_S):
            reason = self.look(time.monotonic())
            if reason is not None and not self._ended.is_set():
                self.reason = reason
                print(f"{time.strftime('%H:%M:%S')} {reason}", flush=True)
                processes.end_run(self._run, self._workdir, self._node, grace_s=1.0, spare=(os.getpid(),))
                return

    def look(self, now_s: float) -> str | None:
        """One look; `reason`'s answer. `now_s` is monotonic."""
        ranks = self._follower.look(now_s).ranks
        for number, rank in ranks.items():
            step, since_s = self._steps.get(number, (None, now_s))
            if rank.phase != "training":
                self._steps.pop(number, None)  # saving and evaluating are no part of a step
            elif step is None:
                self._steps[number] = (rank.step, now_s)
            elif rank.step > step:
                step_s = (now_s - since_s) / (rank.step - step)
                if number in self._warm:
                    self._slowest_step_s = max(self._slowest_step_s or 0.0, step_s)
                else:
                    self._first_step_s = max(self._first_step_s or 0.0, step_s)
                self._warm.add(number)
                self._steps[number] = (rank.step, now_s)
        unheard_s = now_s - max(self._began_s, status_stream.last_heard_s(self._follower.here))
        return reason(unheard_s, ranks, self._slowest_step_s or self._first_step_s, self._follower.planned_s)


@contextlib.contextmanager
def awake(run: str) -> Iterator[None]:
    """Keep this machine from sleeping, where systemd-inhibit exists and this user may (systemd-inhibit(1)); what it refuses is in agent.log.

    It lasts as long as a pipe that nobody else holds: also when this process is killed, the machine may sleep again.
    """
    program = programs.path_of("systemd-inhibit")
    if program is None:
        yield
        return
    command = [program, "--what=sleep:idle:handle-lid-switch", "--who=homelab", f"--why=it trains: {run}", "--mode=block", "cat"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:
        print(f"not kept awake: {error}", flush=True)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
        if process.poll() is None:
            process.kill()
