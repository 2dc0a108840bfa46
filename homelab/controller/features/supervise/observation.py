"""What a supervisor observes between two acts, and what came of the last act. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run.leave import Away
from homelab.shared.recipe import LogPolicy

Save = Literal["asked", "none", "unknown"]
Error = Literal["stopped", "superseded", "other-training", "other"]


@dataclass(frozen=True)
class Followed:
    """`absent`: nodes of the cluster that are not in the attempt's plan."""

    attempt: int
    absent: frozenset[str]


@dataclass(frozen=True)
class Examined:
    """`step`: the newest that was seen; `met`: (node, what of the recipe's log_policies its logs meet)."""

    diagnosis: Diagnosis | None
    step: int
    met: tuple[tuple[str, LogPolicy], ...] = ()


@dataclass(frozen=True)
class HaltResult:
    """`step`: from where the run can go on; `nodes`: that answer. `indispensable`: node -> shards of the checkpoint that it alone has."""

    step: int
    nodes: tuple[str, ...]
    indispensable: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ResumeResult:
    """The new attempt. `is_program`: of a program of one's own."""

    attempt: int
    step: int
    nodes: tuple[str, ...]
    is_program: bool = False


@dataclass(frozen=True)
class Failed:
    """An act of the recovery that did not succeed; `text` has all three parts of the error."""

    kind: Error
    message: str
    hint: str = ""
    text: str = ""


Result = Followed | Examined | HaltResult | ResumeResult | Failed


@dataclass(frozen=True)
class Observation:
    """`now_s` is monotonic, `time` in seconds since 1970. `is_stopped`: by a person, through this machine.

    `nodes`: all that the run may use. `away`: node that is with its owner now -> until when and why. `lent`: nodes that were given back and have not trained since.
    `verdict`, `checkpoint` (the newest that all nodes hold), `well` (nodes that were left out and are well again) and `recut` (why another cut of the
    model, from this checkpoint on, saves time; empty: none does) are there while reviewing and watching. So are `step`, the newest that a rank has done,
    and `save`: whether a save can be asked for ("asked"), is not needed or not possible ("none"), or that cannot be told yet ("unknown").
    """

    now_s: float
    time: float
    is_stopped: bool = False
    result: Result | None = None
    verdict: AttemptVerdict | None = None
    checkpoint: int = 0
    well: frozenset[str] = frozenset()
    recut: str = ""
    away: Mapping[str, Away] = field(default_factory=dict)
    lent: frozenset[str] = frozenset()
    nodes: frozenset[str] = frozenset()
    step: int = 0
    save: Save = "unknown"
