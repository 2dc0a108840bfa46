"""The result of the collective smoke test: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from homelab.shared.protocol.collective_stages import SIZES


@dataclass(frozen=True)
class Measured:
    """One size: seconds of the slowest rank, bus bandwidth (size x 2 (n - 1) / n / seconds), CPU seconds of the busiest rank."""

    size_bytes: int
    seconds: float
    bus_bytes_per_s: float
    cpu_s: float = 0.0


@dataclass(frozen=True)
class RankState:
    """One rank when the test was given up. `is_silent`: its whole node was not heard any more. `stack`: faulthandler's
    lines, or torchrun's own where the rank had not begun."""

    rank: int
    node: str
    stage: str
    is_silent: bool = False
    stack: tuple[str, ...] = ()


@dataclass(frozen=True)
class WrongSum:
    """A sum that came out wrong on this rank: in how many elements, and the first of them in words."""

    rank: int
    node: str
    size_bytes: int
    count: int
    first: str


@dataclass(frozen=True)
class CollectiveResult:
    """One collective smoke test.

    `error` is empty when it came to its end; `node` is then whose error it is ("" where it is nobody's alone). `missing` are the
    ranks that the others waited for, `states` all ranks when it was given up. `left_out` has the sizes that would have taken too
    long, with the seconds they were predicted to take. `left` names what could not be seen to be gone.
    """

    backend: str
    nodes: tuple[str, ...]
    ranks: int
    measured: tuple[Measured, ...] = ()
    left_out: tuple[tuple[int, float], ...] = ()
    wrong: tuple[WrongSum, ...] = ()
    missing: tuple[RankState, ...] = ()
    states: tuple[RankState, ...] = ()
    error: str = ""
    node: str = ""
    left: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True when it came to its end and every sum was right."""
        return not self.error and not self.wrong

    def results(self) -> list[dict[str, Any]]:
        """The sizes as they are kept on the nodes and printed as JSON."""
        return [{"size_bytes": one.size_bytes, "seconds": one.seconds, "bus_bytes_per_s": one.bus_bytes_per_s} for one in self.measured]


def size_name(size_bytes: int) -> str:
    """'64 MB'."""
    return SIZES.get(size_bytes, f"{size_bytes} bytes")


def seconds_text(seconds: float) -> str:
    """'0.35 ms', '15 ms', '1.30 s'."""
    if seconds < 0.0995:
        return f"{seconds * 1e3:.2g} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"
