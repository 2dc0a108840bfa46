"""Processes of a run on this node, found by the environment they were started with (reparented ones too).

A process belongs to a run by its environment, whatever name cluster.toml gives this machine today. Practice nodes share one /proc; each
has its own workdir, which identifies the node of a process.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import boot_clock
from homelab.shared.protocol import files, waiting_mark

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from homelab.shared.protocol.run_messages import Stopped


HUNG_S = 30.0  # longer than a driver takes to wake its cards and answer
SAVING_GRACE_S = 12.0  # more than a rank takes for it (`homelab.worker.training.parting_save`)


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return stream.read().split(b"\0")
    except OSError:
        return []


def command_line(pid: int) -> str:
    """The command of a process as one text, "" when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def state(pid: Any) -> str:
    """The kernel's letter for a process (proc_pid_stat(5)): R S D run or wait, T t stopped, Z X dead; "" when it is gone or unknown."""
    if not isinstance(pid, int):
        return ""
    try:
        return _stat(pid)[0].decode()
    except (OSError, IndexError):
        return ""


def hangs(name: str) -> bool:
    """Whether a process of this name that lives for HUNG_S seconds is in the kernel, where it hears no signal."""
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and files.text(f"/proc/{entry}/comm") == name]
    born_before = (boot_clock.clock_s() - HUNG_S) * os.sysconf("SC_CLK_TCK")
    return any(state(pid) == "D" and (born(pid) or born_before) < born_before for pid in pids)


def is_alive(pid: int) -> bool:
    """True for a process that runs (a zombie does not)."""
    return state(pid) not in ("", "Z", "X")


def namespace() -> str:
    """The namespace in which the pids of this process count; "" where the system has none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def rename(name: str) -> None:
    """Give this process a name (`homelab.shared.protocol.waiting_mark`)."""
    with open("/proc/self/comm", "w") as stream:
        stream.write(name)


def born(pid: int) -> int | None:
    """When a process began, in ticks of the kernel (it names one process for ever, with its number); None once it holds nothing any more.

    Who is killed loses its memory and its environment first and closes its files last, each thread for itself (kernel/exit.c: exit_mm,
    exit_files), and closing them is what frees a card's memory. The first thread may be a zombie meanwhile, and only one that has
    no other thread beside it holds nothing.
    """
    try:
        words = _stat(pid)
        if words[0] in (b"Z", b"X") and len(os.listdir(f"/proc/{pid}/task")) < 2:
            return None
        return int(words[19])
    except (OSError, IndexError, ValueError):
        return None


def is_ending(pid: int) -> bool:
    """True for one that has begun to end and still holds something (PF_EXITING of linux/sched.h)."""
    try:
        return bool(int(_stat(pid)[6]) & 0x4) and born(pid) is not None
    except (OSError, IndexError, ValueError):
        return False


def _stat(pid: int) -> list[bytes]:
    """The words of /proc/PID/stat behind the name (proc_pid_stat(5)): the state is the first."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return stream.read().rsplit(b")", 1)[1].split()


def run_of(pid: int) -> str | None:
    """The run a process belongs to; None for a stranger's, and for one whose environment this user may not read."""
    for entry in _environment(pid):
        if entry.startswith(b"HOMELAB_RUN="):
            return entry[12:].decode("utf-8", "replace")
    return None


def of_runs(workdir: str, node: str, *, standbys: bool = False) -> dict[str, list[int]]:
    """All live processes of any run that has its folder in this workdir: {run name: [pid, ...]}. With `standbys` also those that only wait."""
    pids_of: dict[str, list[int]] = {}
    home = os.path.realpath(paths.expand(workdir))
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        words = _environment(int(name))
        if not any(word.startswith(b"HOMELAB_RUN=") for word in words):
            continue
        entries = dict(word.partition(b"=")[::2] for word in words)
        run = entries.get(b"HOMELAB_RUN", b"").decode("utf-8", "replace")
        waits = waiting_mark.waits(is_marked=waiting_mark.VARIABLE.encode() in entries, name=files.text(f"/proc/{name}/comm"))
        if run and _is_here(entries, home, node) and is_alive(int(name)) and (standbys or not waits):
            pids_of.setdefault(run, []).append(int(name))
    return pids_of


def of_home() -> dict[str, str]:
    """{run: its folder, "" where it does not say} of all live processes of this account, whatever their workdir; those that only wait, too.

    Practice nodes of one account have homes of their own, and share none of it.
    """
    home, runs = os.path.realpath(paths.expand("~")), dict[str, str]()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        entries = dict(word.partition(b"=")[::2] for word in _environment(int(name)))
        run, theirs = (os.fsdecode(entries.get(key, b"")) for key in (b"HOMELAB_RUN", b"HOME"))
        if run and (not theirs or os.path.realpath(theirs) == home) and is_alive(int(name)):
            runs[run] = os.fsdecode(entries.get(b"HOMELAB_RUN_DIR", b""))
    return runs


def _is_here(entries: dict[bytes, bytes], home: str, node: str) -> bool:
    """Whether it was started from the workdir `home`; by the node's name where it does not say."""
    folder = entries.get(b"HOMELAB_RUN_DIR") or entries.get(b"HOMELAB_COLLECTIVE_DIR")
    if folder is None:
        return bool(entries.get(b"HOMELAB_NODE", b"") == node.encode())
    return os.path.dirname(os.path.dirname(os.path.realpath(paths.expand(os.fsdecode(folder))))) == home


def of_run(run: str, workdir: str, node: str, *, standbys: bool = False) -> list[int]:
    """Live processes of one run on this node. With `standbys` also those that only wait."""
    return of_runs(workdir, node, standbys=standbys).get(run, [])


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal; processes that are gone meanwhile are fine."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def end_run(
    run: str, workdir: str, node: str, grace_s: float = 8.0, spare: Iterable[int] = (), ranks: Any = (), *, standbys: bool = True
) -> Stopped:
    """End every process of a run: ask, wait at most `grace_s`, kill, and look again until none is left, and none holds a card any more.

    `standbys`: those too that wait for its next attempt. A rank that saves its last step gets SAVING_GRACE_S more.
    `ranks`: numbers of processes that were the run's, wherever they are known from; one that is ending already is waited for, too.
    `left` of the answer is what even SIGKILL did not end within 5 s.
    """
    from homelab.shared.protocol.run_messages import Stopped  # every question asks this module, and few end a run

    birth_of = {pid: born(pid) for pid in ranks if is_ending(pid)}

    def remaining() -> list[int]:
        pids = [pid for pid in of_run(run, workdir, node, standbys=standbys) if pid not in spare]
        if not pids:
            time.sleep(0.05)  # a process in execve has no environment for a moment
            pids = [pid for pid in of_run(run, workdir, node, standbys=standbys) if pid not in spare]
        for pid in pids:
            birth_of.setdefault(pid, born(pid))
        # A process that is ending has no environment any more, but may still hold the card.
        return pids + [pid for pid, began in birth_of.items() if pid not in pids and began is not None and born(pid) == began]

    signalled = remaining()
    # A stopped (frozen) process cannot handle SIGTERM before it is continued.
    signal_all(signalled, signal.SIGTERM)
    signal_all(signalled, signal.SIGCONT)
    deadline = time.monotonic() + grace_s
    latest = deadline + SAVING_GRACE_S
    left = signalled
    while left and time.monotonic() < (latest if any(files.text(f"/proc/{pid}/comm") == waiting_mark.SAVES for pid in left) else deadline):
        time.sleep(0.05)
        left = remaining()
    left = remaining() if left else left  # who saves may have ended between the look and the reading of its name
    killed = set()
    deadline = time.monotonic() + 5.0
    while left and time.monotonic() < deadline:
        killed.update(left)
        signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
        left = remaining()
    return Stopped(asked=len(signalled), killed=len(killed), left=tuple(left))
