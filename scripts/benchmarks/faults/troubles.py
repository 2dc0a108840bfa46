"""What happens during a soak: each trouble is a context manager that injects a fault and repairs it at its end.

All of them are survived by a run: none changes what is trained, or ends it on purpose.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.ground import Ground, SeenRun
from benchmarks.faults.outside import JUMP_S, mute, stranger, without_sshd
from benchmarks.faults.prepared import AGENTS, LAUNCHERS, waits
from benchmarks.faults.scene import Unexpected

from homelab.lab import procfs

FOUND_S = 120.0  # a recovery may be under way: its processes are to come


@dataclass
class Place:
    """Where a soak happens: one run, for long. `clocks`: node -> the file that moves its clock."""

    ground: Ground
    run: SeenRun
    draw: random.Random
    clocks: dict[str, Path] = field(default_factory=dict)
    supervisors: list[subprocess.Popen[str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)  # by supervisors that were started by hand
    victim: str = ""

    def names(self) -> list[str]:
        """The nodes of the newest attempt, the head first."""
        return self.run.node_names(self.run.attempt())

    def node(self, *, head: bool | None = None) -> str:
        """A random node of the newest attempt; `head`: only it, or only others."""
        names = self.names()
        self.victim = self.draw.choice(names if head is None else names[:1] if head else names[1:])
        return self.victim

    def processes(self, *words: str, but: str = "") -> tuple[str, list[int]]:
        """A random node, and its processes of this attempt whose command line holds one of `words`, but not `but`; waits for a recovery.

        Raises Unexpected.
        """
        deadline = time.monotonic() + FOUND_S
        while time.monotonic() < deadline:
            node = self.node()
            lines = {pid: procfs.command_line(pid) for pid in self.ground.lab.processes_of_run(self.run.name)[node]}
            pids = [pid for pid, line in lines.items() if {*words} & {*line} and but not in line and not waits(pid)]
            if pids:
                return node, pids
            time.sleep(0.2)
        raise Unexpected(f"no process {' or '.join(words)} of the run on any node for {FOUND_S:.0f} s")

    def workers(self) -> tuple[str, list[int]]:
        """A random node, and its training processes."""
        return self.processes("homelab.worker", but="torch.distributed.run")

    def supervise(self) -> None:
        """`homelab supervise`, as a person would start it."""
        process = self.ground.desk.spawn("supervise", self.run.name)
        self.supervisors.append(process)

        def listen() -> None:
            assert process.stdout is not None
            self.said.extend(process.stdout)

        threading.Thread(target=listen, daemon=True, name="supervisor's words").start()

    def close(self) -> None:
        """End what was started by hand."""
        for process in self.supervisors:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


Happens = Callable[[Place], AbstractContextManager[None]]


@dataclass(frozen=True)
class Trouble:
    """`lasts_s`: shortest and longest time until it is repaired."""

    title: str
    happens: Happens
    lasts_s: tuple[float, float] = (0.0, 0.0)
    needs_clock: bool = False


@contextmanager
def worker_killed(place: Place) -> Iterator[None]:
    """kill -9 of one training process."""
    _, pids = place.workers()
    procfs.send(pids, signal.SIGKILL)
    yield


@contextmanager
def torchrun_killed(place: Place) -> Iterator[None]:
    """kill -9 of torchrun, or of what takes its place in an attempt that was prepared (`homelab.node.run.rank_launcher`)."""
    _, pids = place.processes(*LAUNCHERS)
    procfs.send(pids, signal.SIGKILL)
    yield


@contextmanager
def agent_killed(place: Place) -> Iterator[None]:
    """kill -9 of the agent that waits for it; in an attempt that was prepared it is the one that stood by."""
    _, pids = place.processes(*AGENTS)
    procfs.send(pids, signal.SIGKILL)
    yield


@contextmanager
def worker_frozen(place: Place) -> Iterator[None]:
    """SIGSTOP to one training process; nobody continues it."""
    _, pids = place.workers()
    procfs.send(pids, signal.SIGSTOP)
    yield


def _fault(begin: str, end: str, *, head: bool | None = None) -> Happens:
    @contextmanager
    def happens(place: Place) -> Iterator[None]:
        node = place.node(head=head)
        place.ground.lab.fault(node, begin)
        try:
            yield
        finally:
            place.ground.lab.fault(node, end)

    return happens


@contextmanager
def one_way_loss(place: Place) -> Iterator[None]:
    """What a node sends to the other nodes is lost for a while."""
    with mute(place.ground.lab, place.node()):
        yield


@contextmanager
def sshd_dead(place: Place) -> Iterator[None]:
    """No login to a node works for a while."""
    with without_sshd(place.ground.lab, place.node()):
        yield


@contextmanager
def supervisor_killed(place: Place) -> Iterator[None]:
    """kill -9 of the supervisor; then `homelab supervise` starts it again."""
    place.victim = "controller"
    place.run.kill_supervisor()
    try:
        yield
    finally:
        place.supervise()


@contextmanager
def checkpoint_damaged(place: Place) -> Iterator[None]:
    """One byte of a node's newest checkpoint is another one, then its worker dies."""
    node, pids = place.workers()
    folders = sorted(place.run.folder(node).glob("checkpoints/step-*"))
    if folders:  # none before the first one is due
        file = max(folders[-1].glob("*.safetensors"), key=lambda file: file.stat().st_size)
        with file.open("r+b") as stream:
            stream.seek(place.draw.randrange(file.stat().st_size))
            byte = stream.read(1)[0]
            stream.seek(-1, os.SEEK_CUR)
            stream.write(bytes([byte ^ 0x10]))
    procfs.send(pids, signal.SIGKILL)
    yield


@contextmanager
def port_taken(place: Place) -> Iterator[None]:
    """A stranger takes the rendezvous port and those behind it on every node, then a worker dies."""
    with ExitStack() as strangers:
        for name in place.names():
            strangers.enter_context(stranger(place.ground.lab, name))
        _, pids = place.workers()
        procfs.send(pids, signal.SIGKILL)
        yield


@contextmanager
def two_at_once(place: Place) -> Iterator[None]:
    """A worker killed on one node, and within a second another node without power."""
    first, pids = place.workers()
    second = place.draw.choice([name for name in place.names() if name != first] or [first])
    place.victim = f"{first}, {second}"
    procfs.send(pids, signal.SIGKILL)
    time.sleep(place.draw.uniform(0.0, 0.9))
    place.ground.lab.fault(second, "power-cut")
    try:
        yield
    finally:
        place.ground.lab.fault(second, "power-on")


@contextmanager
def clock_jumps(place: Place) -> Iterator[None]:
    """The clock of a node is an hour off for a while."""
    place.victim = place.draw.choice(sorted(place.clocks))
    offset = place.clocks[place.victim]
    offset.write_text(f"{place.draw.choice((-JUMP_S, JUMP_S))}\n")
    try:
        yield
    finally:
        offset.write_text("0\n")


OUTAGE_S = (20.0, 60.0)
POWER_S = (10.0, 40.0)
ALL = (
    Trouble("a worker is killed", worker_killed),
    Trouble("torchrun is killed", torchrun_killed),
    Trouble("the agent is killed", agent_killed),
    Trouble("a node loses its power", _fault("power-cut", "power-on", head=False), POWER_S),
    Trouble("the head loses its power", _fault("power-cut", "power-on", head=True), POWER_S),
    Trouble("a cable is pulled", _fault("pull-cable", "plug-cable"), OUTAGE_S),
    Trouble("nothing that a node sends arrives at its peers", one_way_loss, OUTAGE_S),
    Trouble("a worker is frozen", worker_frozen),
    Trouble("a node stands still", _fault("freeze", "thaw"), OUTAGE_S),
    Trouble("sshd of a node is dead", sshd_dead, OUTAGE_S),
    Trouble("the supervisor is killed", supervisor_killed, (1.0, 20.0)),
    Trouble("a checkpoint is damaged, a worker is killed", checkpoint_damaged),
    Trouble("a stranger takes the port, a worker is killed", port_taken, OUTAGE_S),
    Trouble("a worker is killed, another node loses its power", two_at_once, POWER_S),
    Trouble("the clock of a node is an hour off", clock_jumps, OUTAGE_S, needs_clock=True),
)
