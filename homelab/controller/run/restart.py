"""An automatic restart of a run, as its supervisor records it. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Restart:
    """One automatic restart that was made: when (seconds since 1970), why, and from which step."""

    at: float
    cause: str
    node: str
    resume_step: int
