"""What a node does for itself while it trains: it stays awake, and when it has lost the controller and the other nodes it lets go.

A rank that waits for peers which never come again holds its card for half an hour, and one that was stopped by a signal for ever. Who is
still followed by a supervisor leaves that to it; who has only lost the controller (a laptop lid) trains on.
"""

import contextlib
import os
import subprocess
import threading
import time

from homelab.node import follow, processes, programs

LOOK_S = 1.0
ALONE_S = 60.0
# A step of a node that is slowed to a tenth takes ten times as long, and the others wait for it without a sign.
STEP_FACTOR = 30.0
# Before a step was timed (kernels are compiled, caches are cold), and where one node may rightly take long (`homelab.runs.watchdog`).
LIMITS_S = {"starting": 1200.0, "loading": 1200.0, "fetching": 180.0, "saving": 900.0, "evaluating": 1800.0}
FIRST_STEP_S, FIRST_STEP_FACTOR = 600.0, 4.0


def reason(unheard_s, ranks, slowest_step_s, planned_s=None):
    """Why this node is to stop its ranks, in words; None while there is no reason.

    `unheard_s`: since the last word of whoever follows the attempt, or since its start. `ranks`: `follow.Follower.look`'s.
    `slowest_step_s`: of those that were seen, None before the first; `planned_s`: how long the plan expects one to take, None where it
    does not know. A program without heartbeats is never stopped.
    """
    waiting = [rank for rank in ranks.values() if rank["phase"] not in ("absent", "done")]
    if not waiting or unheard_s < ALONE_S:
        return None
    if any(rank["still_s"] < _limit_s(rank["phase"], slowest_step_s, planned_s) for rank in waiting):
        return None
    still_s = min(rank["still_s"] for rank in waiting)
    return "no controller was heard for %.0f s, and no rank did anything for %.0f s: the other nodes are lost" % (unheard_s, still_s)


def _limit_s(phase, slowest_step_s, planned_s):
    if phase != "training":
        return LIMITS_S.get(phase, FIRST_STEP_S)
    if slowest_step_s is None:
        return max(FIRST_STEP_S, FIRST_STEP_FACTOR * (planned_s or 0.0))
    return max(ALONE_S, STEP_FACTOR * slowest_step_s)


class Guard:
    """A context manager around one attempt. `reason` is set when the node has let go; the attempt's own processes are ended then."""

    def __init__(self, workdir, run, attempt, node):
        self.reason = None
        self._run, self._workdir, self._node = run, workdir, node
        self._follower = follow.Follower(workdir, run, attempt, node)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="guard")
        self._steps = {}  # rank -> (step, since when)
        self._slowest_step_s = None
        self._began_s = time.monotonic()

    def __enter__(self):
        if self._follower.peers:
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()

    def _watch(self):
        while not self._ended.wait(LOOK_S):
            found = self.look(time.monotonic())
            if found is not None and not self._ended.is_set():
                self.reason = found
                print("%s %s" % (time.strftime("%H:%M:%S"), found), flush=True)
                processes.end_run(self._run, self._workdir, self._node, grace_s=1.0, spare=(os.getpid(),))
                return

    def look(self, now_s):
        """One look; `reason`'s answer. `now_s` is monotonic."""
        ranks = self._follower.look(now_s)["ranks"]
        for number, rank in ranks.items():
            step, since_s = self._steps.get(number, (None, now_s))
            if rank["phase"] != "training":
                self._steps.pop(number, None)  # saving and evaluating are no part of a step
            elif step is None:
                self._steps[number] = (rank["step"], now_s)
            elif rank["step"] > step:
                self._slowest_step_s = max(self._slowest_step_s or 0.0, (now_s - since_s) / (rank["step"] - step))
                self._steps[number] = (rank["step"], now_s)
        unheard_s = now_s - max(self._began_s, follow.last_heard_s(self._follower.here))
        return reason(unheard_s, ranks, self._slowest_step_s, self._follower.planned_s)


@contextlib.contextmanager
def awake(run):
    """Keep this machine from sleeping, where systemd-inhibit exists and this user may (systemd-inhibit(1)); what it refuses is in agent.log.

    It lasts as long as a pipe that nobody else holds: also when this process is killed, the machine may sleep again.
    """
    program = programs.path_of("systemd-inhibit")
    if program is None:
        yield
        return
    command = [program, "--what=sleep:idle:handle-lid-switch", "--who=homelab", "--why=it trains: %s" % run, "--mode=block", "cat"]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    except OSError as error:
        print("not kept awake: %s" % error, flush=True)
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
        if process.poll() is None:
            process.kill()
