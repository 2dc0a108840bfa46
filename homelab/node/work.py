"""Whether a process works: the processor time and the bytes that it uses, from /proc alone.

It counts where a rank has nothing else to say (it imports, loads a model, fetches or writes a checkpoint). In a step it says nothing:
who waits for a peer in a collective may keep the processor as busy as who computes.
"""

import os

# Long enough that a process that gets a twentieth of a processor is seen to use it.
WINDOW_S = 2.0
# What a rank that only waits stays below: threads that wake up to look whether there is something to do.
CORES, BYTES_PER_S = 0.02, 64 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def used(pid):
    """(processor seconds, bytes read and written) of a process since its start (proc_pid_stat(5), proc_pid_io(5)); None when it is gone.

    Bytes of files that are mapped into memory count when they come from the disk. 0 bytes where this user may not look.
    """
    try:
        with open("/proc/%d/stat" % pid, "rb") as stream:
            words = stream.read().rsplit(b")", 1)[1].split()
        cpu_s = (int(words[11]) + int(words[12])) / _TICKS_PER_S
    except (OSError, IndexError, ValueError):
        return None
    try:
        with open("/proc/%d/io" % pid, "rb") as stream:
            counted = dict(line.split(b": ") for line in stream.read().splitlines())
        return cpu_s, sum(int(counted[name]) for name in (b"rchar", b"wchar", b"read_bytes", b"write_bytes"))
    except (OSError, KeyError, ValueError):
        return cpu_s, 0


class Work:
    """One process, looked at again and again. Every time is monotonic."""

    def __init__(self):
        self._pid = None
        self._used = None
        self._at_s = 0.0

    def look(self, pid, now_s):
        """True when it is seen to have worked since the last look that said so, or since the first."""
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
