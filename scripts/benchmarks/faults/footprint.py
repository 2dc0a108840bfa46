"""What the supervisor and a run's nodes hold, from fault to fault: what is left over at each would end a run of weeks."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.faults.ground import SeenRun, left_on

from homelab.lab import Lab, procfs

# A descriptor, a thread or a process for each attempt would be as many as there are attempts; some come and go. The curve's points and
# Python's own tables were measured to be 0.25 MiB an attempt.
MOST_MORE, MOST_MIB_AN_ATTEMPT = 4, 0.5


@dataclass(frozen=True)
class Footprint:
    """Of the process `pid` while `attempt` trained."""

    pid: int
    attempt: int
    descriptors: int
    threads: int
    resident_mib: float
    on_nodes: int  # processes of the run, on all nodes


def footprint(run: SeenRun, lab: Lab) -> Iterator[Footprint]:
    """Now; nothing where no supervisor is at work."""
    pid = run.supervisor().get("pid")
    with contextlib.suppress(OSError, KeyError):  # it may be killed in this moment
        if isinstance(pid, int) and run.supervisor_alive():
            status = (procfs.PROC / str(pid) / "status").read_text(encoding="utf-8")
            said = {name: int(value) for name, value in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE)}
            descriptors = len(list((procfs.PROC / str(pid) / "fd").iterdir()))
            yield Footprint(pid, run.attempt(), descriptors, said["Threads"], said["VmRSS"] / 1024, len(left_on(lab)))


def grown(footprints: Sequence[Footprint]) -> dict[str, float]:
    """Of the process that saw most attempts: from its first quarter to its last one (the least of each: what is under way comes and goes)."""
    by_process = [list(group) for _, group in itertools.groupby(footprints, lambda one: one.pid)]
    longest = max(by_process, key=lambda group: group[-1].attempt - group[0].attempt, default=[])
    attempts = longest[-1].attempt - longest[0].attempt if longest else 0
    if not attempts:
        return {}
    some = max(1, len(longest) // 4)
    first, last = longest[:some], longest[-some:]

    def more(name: str) -> float:
        return float(min(getattr(one, name) for one in last) - min(getattr(one, name) for one in first))

    return {
        "soak_supervisor_attempts": float(attempts), "soak_supervisor_descriptors_more": more("descriptors"),
        "soak_supervisor_threads_more": more("threads"), "soak_supervisor_mib_more": more("resident_mib"),
        "soak_on_nodes_more": more("on_nodes"),
    }  # fmt: skip


def too_much(figures: dict[str, float]) -> list[str]:
    """What grew from attempt to attempt, of a row of many (a few grow by what a supervisor has to begin with)."""
    if not figures:
        return ["no supervisor was seen in two attempts"]
    attempts = figures["soak_supervisor_attempts"]
    limits = {
        "soak_supervisor_descriptors_more": MOST_MORE, "soak_supervisor_threads_more": MOST_MORE,
        "soak_supervisor_mib_more": MOST_MIB_AN_ATTEMPT * attempts, "soak_on_nodes_more": MOST_MORE,
    }  # fmt: skip
    return [f"{name}: {figures[name]:.0f} in {attempts:.0f} attempts" for name, limit in limits.items() if figures[name] > limit]
