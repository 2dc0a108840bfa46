"""The restarts of a run, as its supervisor records them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

OUT_OF_MEMORY = frozenset({"cuda-out-of-memory", "host-out-of-memory", "oom-killer"})


@dataclass(frozen=True)
class Restart:
    """One restart that was made: when (seconds since 1970), why, and from which step."""

    at: float
    cause: str
    node: str
    resume_step: int


def halvings(ends: Iterable[Restart]) -> dict[str, int]:
    """node -> how often its memory ran out: its micro-batch is halved so often. The global batch stays."""
    return dict(Counter(end.node for end in ends if end.cause in OUT_OF_MEMORY))
