"""What the supervisor takes of its machine, from fault to fault: what is left over at each would end a run of weeks."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.faults.ground import SeenRun

from homelab.lab import procfs


@dataclass(frozen=True)
class Footprint:
    """Of the process `pid` while `attempt` trained."""

    pid: int
    attempt: int
    descriptors: int
    threads: int
    resident_mib: float


def footprint(run: SeenRun) -> Iterator[Footprint]:
    """Now; nothing where no supervisor is at work."""
    pid = run.supervisor().get("pid")
    with contextlib.suppress(OSError, KeyError):  # it may be killed in this moment
        if isinstance(pid, int) and run.supervisor_alive():
            status = (procfs.PROC / str(pid) / "status").read_text(encoding="utf-8")
            said = {name: int(value) for name, value in re.findall(r"^(Threads|VmRSS):\s+(\d+)", status, re.MULTILINE)}
            descriptors = len(list((procfs.PROC / str(pid) / "fd").iterdir()))
            yield Footprint(pid, run.attempt(), descriptors, said["Threads"], said["VmRSS"] / 1024)


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
    }  # fmt: skip
