"""Whether a part of a benchmark ran on the machines that it names: their CPU limits held, and nobody else computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_OVER = 0.10  # of what a node may use: the kernel hands out CPU time in slices, and the limit is set a moment after the clock starts
_UNDER = 0.15  # of what a node may use, where it computes all the time
_OTHERS = 0.10  # of this machine's cores: the kernel's own work and what the readings miss are less
_SLACK_S = 0.3  # CPU seconds: a short part is judged by no more than a slice


@dataclass(frozen=True)
class Account:
    """CPU time between two moments that are `seconds` apart, in CPU seconds.

    `nodes`: what each node used, and what its limits allowed. `ours`: the benchmark, and the supervisors that it started.
    `busy`: all that this machine computed, and what its host took away (steal).
    """

    seconds: float
    cores: int
    busy: float
    ours: float
    nodes: Mapping[str, tuple[float, float]]

    @property
    def busy_cores(self) -> float:
        """Cores of this machine that were busy, for whomever."""
        return self.busy / self.seconds

    @property
    def others_cores(self) -> float:
        """Cores that were busy for neither the nodes nor the benchmark."""
        return max(0.0, self.busy - self.ours - sum(used for used, _ in self.nodes.values())) / self.seconds


def disturbance(account: Account, *, computing: bool = False) -> str | None:
    """Why figures from this time count for nothing; None where they count.

    `computing`: every node had work all the time, so it should have used what it was allowed. Where nodes wait for each other
    that says nothing.
    """
    if account.seconds <= 0:
        return "no time has passed"
    problems = []
    for node, (used, allowed) in account.nodes.items():
        cores = f"{used / account.seconds:.2f} cores of {allowed / account.seconds:.2f}"
        if used > allowed * (1 + _OVER) + _SLACK_S:
            problems.append(f"{node} used {cores}: its limit was not held")
        if computing and used < allowed * (1 - _UNDER) - _SLACK_S:
            problems.append(f"{node} got {cores}: something kept it from computing")
    if account.others_cores * account.seconds > _OTHERS * account.cores * account.seconds + _SLACK_S:
        problems.append(f"others kept {account.others_cores:.2f} of this machine's {account.cores} cores busy")
    return "; ".join(problems) or None
