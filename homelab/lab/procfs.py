"""What /proc says of processes: whose children they are, with which environment; and making sure that they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """One living process. `state` is the letter of proc(5): R, S, D, T (stopped), ... (zombies are not listed)."""

    pid: int
    parent: int
    state: str


def processes() -> dict[int, Process]:
    """All processes of this PID namespace that are not zombies."""
    by_pid = {}
    for entry in os.listdir(PROC):
        if entry.isdigit() and (process := read(int(entry))) is not None:
            by_pid[process.pid] = process
    return by_pid


def read(pid: int) -> Process | None:
    """The process of this number, or None when it is gone or a zombie."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The program's name stands in brackets and may hold spaces and brackets itself: count from the last one.
    state, parent = text.rpartition(")")[2].split()[:2]
    return None if state in ("Z", "X") else Process(pid, int(parent), state)


def environment(pid: int) -> dict[str, str]:
    """The environment `pid` was started with; empty when it is gone or belongs to someone else."""
    try:
        raw = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="surrogateescape").split("\0"))
    return {name: value for name, separator, value in pairs if separator}


def command_line(pid: int) -> list[str]:
    """The arguments of `pid`; empty when it is gone."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return raw.decode(errors="surrogateescape").rstrip("\0").split("\0")


def pid_namespace(pid: int) -> str:
    """The PID namespace of `pid`, like "pid:[4026532200]"; empty when it is gone or may not be asked."""
    try:
        return os.readlink(PROC / str(pid) / "ns" / "pid")
    except OSError:
        return ""


def with_environment(name: str, value: str, among: Iterable[int] | None = None) -> set[int]:
    """The processes whose environment holds name=value."""
    pids = processes() if among is None else among
    return {pid for pid in pids if environment(pid).get(name) == value}


def descendants(roots: Collection[int], among: dict[int, Process]) -> set[int]:
    """`roots` and all their children, grandchildren, ..."""
    children: dict[int, list[int]] = {}
    for process in among.values():
        children.setdefault(process.parent, []).append(process.pid)
    pids: set[int] = set()
    todo = list(roots)
    while todo:
        pid = todo.pop()
        if pid not in pids:
            pids.add(pid)
            todo += children.get(pid, [])
    return pids


def self_and_ancestors() -> set[int]:
    """This process, its parent, and so on: never to be ended by a clean-up."""
    pids = {os.getpid()}
    pid = os.getppid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        process = read(pid)
        pid = process.parent if process else 0
    return pids


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal every process; one that ended in the meantime is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition()`; False when it did not come true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.002
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)
    return True


def kill_until_gone(find: Callable[[], set[int]], timeout_s: float = 10.0) -> set[int]:
    """SIGKILL whatever `find` finds, again and again (a process may fork meanwhile); return what would not die."""

    def gone() -> bool:
        pids = find()
        send(pids, signal.SIGKILL)
        return not pids

    return set() if until(gone, timeout_s) else find()
