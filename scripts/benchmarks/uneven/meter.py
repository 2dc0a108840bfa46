"""What the practice nodes, this benchmark and everybody else on this machine have computed, from /proc.

A node's CPU time is that of its processes and of the children they have waited for: its first process takes in whoever loses a
parent, so nothing is lost. (Its control group knows no CPU time where `cpu` and `cpuacct` are mounted apart, as cgroup v1 may be.)

What all compute is the sum over all processes, too. The first line of /proc/stat is not used for it: it counts who runs at a timer
tick, and a limited node gets its share anew right at a tick. Measured with three endless loops limited to 0.6, 0.3 and 0.2 core: their
own files say 1.11 cores, as allowed, and /proc/stat says 1.22 to 1.38.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.uneven.validity import Account

from homelab.lab import Lab, procfs

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_ENDING_S = 5.0  # a run that has just ended takes so long at most until all its processes have been waited for


class Meter:
    """Counts from `begin` on. Every change of a limit is told with `limited`."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._limits: dict[str, float] = {}
        self._allowed: dict[str, float] = {}
        self._at = self._began = time.monotonic()
        self._before = _Reading(lab)

    def limited(self, cores: dict[str, float]) -> None:
        """These nodes have these limits from now on, in cores."""
        self._accrue()
        self._limits |= cores

    def begin(self) -> None:
        """Forget all that was counted."""
        self._before = _Reading(self._lab)
        self._at = self._began = time.monotonic()
        self._allowed = dict.fromkeys(self._limits, 0.0)

    def account(self) -> Account:
        """What was computed since `begin`."""
        now, before = _Reading(self._lab), self._before
        deadline = time.monotonic() + _ENDING_S
        # Between its end and its parent's word that it has seen it, a process's time is nowhere.
        while any(now.nodes[node] < seconds for node, seconds in before.nodes.items()) and time.monotonic() < deadline:
            time.sleep(0.1)
            now = _Reading(self._lab)
        self._accrue()
        # A supervisor that has ended meanwhile takes its time with it: its parent is nobody of ours.
        supervisors = sum(seconds - before.supervisors.get(key, 0.0) for key, seconds in now.supervisors.items())
        return Account(
            seconds=time.monotonic() - self._began,
            cores=os.cpu_count() or 1,
            busy=now.busy - before.busy,
            ours=now.own - before.own + supervisors,
            nodes={node: (now.nodes[node] - before.nodes[node], self._allowed[node]) for node in self._limits},
        )

    def _accrue(self) -> None:
        now = time.monotonic()
        for node, cores in self._limits.items():
            self._allowed[node] = self._allowed.get(node, 0.0) + cores * (now - self._at)
        self._at = now


class _Reading:
    """CPU seconds since each of them was started."""

    def __init__(self, lab: Lab) -> None:
        of_nodes = {node.name: lab.processes_of(node.name) for node in lab.nodes}
        self.nodes = {node: _total(pids) for node, pids in of_nodes.items()}
        own_pids = procfs.descendants([os.getpid()], procfs.processes()).difference(*of_nodes.values())
        self.own = _total(own_pids)
        beside = started_by_us(lab.cluster_file).difference(own_pids, *of_nodes.values())
        self.supervisors = {(pid, started): seconds for pid in beside for started, seconds in _spent(pid)}
        self.busy = _total(map(int, filter(str.isdigit, os.listdir("/proc")))) + stolen_s(Path("/proc/stat").read_text())


def started_by_us(cluster_file: Path) -> set[int]:
    """Processes of homelab that know this cluster file from their environment: commands, and supervisors that outlive them."""
    return procfs.with_environment("HOMELAB_CLUSTER", str(cluster_file)) - procfs.self_and_ancestors()


def stolen_s(stat: str) -> float:
    """CPU seconds in /proc/stat that the machine's host gave to somebody else while work waited here (proc_stat(5))."""
    return int(stat.split("\n", 1)[0].split()[8]) * _TICK_S


def _total(pids: Iterable[int]) -> float:
    return sum(seconds for pid in pids for _, seconds in _spent(pid))


def _spent(pid: int) -> list[tuple[int, float]]:
    """[(start time, CPU seconds with those of the children it has waited for)] of a process; nothing when it is gone."""
    try:
        return [spent(Path(f"/proc/{pid}/stat").read_text(errors="replace"))]
    except OSError:
        return []


def spent(stat: str) -> tuple[int, float]:
    """Start time in ticks, and CPU seconds with those of waited-for children, in /proc/PID/stat (proc_pid_stat(5), 14 to 17 and 22)."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]), sum(map(int, fields[11:15])) * _TICK_S
