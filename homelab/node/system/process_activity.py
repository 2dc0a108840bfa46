"""Whether a process works: the processor time and the bytes that it uses, from /proc alone.

It is used while a rank gives no other sign (it imports, loads a model, fetches or writes a checkpoint). During a step it is not used:
a rank that waits for a peer in a collective may keep the processor as busy as a rank that computes.
"""

from __future__ import annotations

import os

# Long enough to show that a process uses a twentieth of a processor.
WINDOW_S = 2.0
# A waiting rank stays below this: its threads wake up only to check for work.
CORES, BYTES_PER_S = 0.02, 64 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def used(pid: int) -> tuple[float, int] | None:
    """(processor seconds, bytes read and written) of a process since its start (proc_pid_stat(5), proc_pid_io(5)); None when it is gone.

    Bytes of files that are mapped into memory count when they come from the disk. 0 bytes where this user may not look.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            words = stream.read().rsplit(b")", 1)[1].split()
        cpu_s = (int(words[11]) + int(words[12])) / _TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return None
    try:
        with open(f"/proc/{pid}/io", "rb") as stream:
            counted = dict(line.split(b": ") for line in stream.read().splitlines())
        return cpu_s, sum(int(counted[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
    except (OSError, KeyError, ValueError):
        return cpu_s, 0


class Work:
    """One process, looked at again and again. Every time is monotonic."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._used: tuple[float, int] | None = None
        self._at_s = 0.0

    def look(self, pid: int, now_s: float) -> bool:
        """True when the process has worked since the last look that returned True, or since the first look."""
        if pid != self._pid:
            self._pid, self._used, self._at_s = pid, used(pid), now_s
            return False
        seconds = now_s - self._at_s
        if seconds < WINDOW_S:
            return False
        before, self._used, self._at_s = self._used, used(pid), now_s
        if before is None or self._used is None:
            return False
        cpu_s, count_bytes = self._used[0] - before[0], self._used[1] - before[1]
        return cpu_s >= CORES * seconds or count_bytes >= BYTES_PER_S * seconds
