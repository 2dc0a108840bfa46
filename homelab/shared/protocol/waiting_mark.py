"""How a process of a run says by its name what it is at: that it waits for the next attempt, works, or saves before it ends. Node program and worker both say and read it here."""

from __future__ import annotations

VARIABLE = "HOMELAB_STANDBY"  # in the environment that it was started with, which other processes read for ever
# Its name (/proc/PID/comm, which ps(1) shows) once its imports are done, and from when on it is one of its run; at most 15 characters (prctl(2)).
WAITS, AT_WORK, SAVES = "homelab-waits", "homelab-at-work", "homelab-saves"

RANK_BYTES = (
    1 << 30
)  # a rank that waits has 0.32 GB of its own (a small Llama, the CPU build of torch); the rest is for the training beside it


def waits(*, is_marked: bool, name: str) -> bool:
    """Whether a process only waits. `is_marked`: the variable is in its environment; `name`: the content of /proc/PID/comm."""
    return is_marked and name.strip() not in (AT_WORK, SAVES)
