"""`[checkpoint]`, `[recovery]` and `[tracking]`: how a run is kept alive and what is written down of it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from homelab.shared.markers import AtLeast, AtMost, Holds, Shortest


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on every node each `every_steps` optimizer steps; the last `keep` stay, and each one of a step that `keep_every` divides.

    `every_steps` left out: as often as pays, from what a save is measured to cost. Saving takes at most 3.5 % of the time, and a
    fault loses at most two minutes of work (`homelab.shared.law.checkpoint_interval`).
    """

    every_steps: Annotated[int | None, AtLeast(1)] = None
    keep: Annotated[int, AtLeast(1), AtMost(1_000_000)] = 3
    keep_every: Annotated[int | None, AtLeast(1)] = None

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint of this step is saved in any case, and never removed."""
        return self.keep_every is not None and step % self.keep_every == 0


def _is_a_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression (Python's re): {error}") from error
    return pattern


@dataclass(frozen=True)
class LogPolicy:
    """What a line in a node's log means to the owner: leave that node out of the next attempt, or stop trying."""

    pattern: Annotated[str, Shortest(1), Holds(_is_a_pattern)]
    action: Literal["exclude", "stop"]


# Lines after which a machine needs its owner: a card that is off the bus until the next boot (NVIDIA's Xid catalogue: 48, 79 and 95),
# and a disk that fails.
_LOG_POLICIES = (
    LogPolicy(pattern=r"GPU is lost|fallen off the bus|[Uu]ncorrectable ECC|\bXid\b.*: (?:48|79|95)\b", action="exclude"),
    LogPolicy(pattern=r"\[Errno (?:5|30)\]|Input/output error|Read-only file system", action="exclude"),
)


@dataclass(frozen=True)
class Recovery:
    """How a run goes on after a failure: by itself or not, how often within an hour, with how few nodes, with which exceptions."""

    auto: bool = True
    max_restarts: Annotated[int, AtLeast(0)] = 5
    min_nodes: Annotated[int, AtLeast(1)] = 1
    rejoin: Literal["next-checkpoint", "never"] = "next-checkpoint"
    standby: bool = True
    log_policies: tuple[LogPolicy, ...] = _LOG_POLICIES


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow", "aim", "swanlab"]


def _each_once(to: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    if len(set(to)) < len(to):
        raise ValueError("each tracker once")
    return to


@dataclass(frozen=True)
class Tracking:
    """What is written down beside the metrics. It goes with the run and is no part of the law's hash, so it may change at any time."""

    tensorboard: bool = True
    eval_every_steps: Annotated[int, AtLeast(0)] = 0
    to: Annotated[tuple[Tracker, ...], Holds(_each_once)] = ()
