"""`[checkpoint]`, `[recovery]` and `[tracking]`: how a run is kept alive and what is written down of it."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from homelab.controller.base.models import ConfigModel


class Checkpoint(ConfigModel):
    """A complete checkpoint on every node each `every_steps` optimizer steps; the last `keep` stay.

    `every_steps` left out: as often as pays, from what a save is measured to cost. Saving takes at most 3.5 % of the time, and a
    fault loses at most two minutes of work (`homelab.shared.law.checkpoint_interval`).
    """

    every_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=3, ge=1, le=1_000_000)


class LogPolicy(ConfigModel):
    """What a line in a node's log means to the owner: leave that node out of the next attempt, or stop trying."""

    pattern: str = Field(min_length=1)
    action: Literal["exclude", "stop"]

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a regular expression (Python's re): {error}") from error
        return pattern


# Lines after which a machine needs its owner: a card that is off the bus until the next boot (NVIDIA's Xid catalogue: 48, 79 and 95),
# and a disk that fails.
_LOG_POLICIES = (
    LogPolicy(pattern=r"GPU is lost|fallen off the bus|[Uu]ncorrectable ECC|\bXid\b.*: (?:48|79|95)\b", action="exclude"),
    LogPolicy(pattern=r"\[Errno (?:5|30)\]|Input/output error|Read-only file system", action="exclude"),
)


class Recovery(ConfigModel):
    """How a run goes on after a failure: by itself or not, how often within an hour, with how few nodes, with which exceptions.

    `rejoin`: when a node that was left out is taken back once it is well again.
    """

    auto: bool = True
    max_restarts: int = Field(default=5, ge=0)
    min_nodes: int = Field(default=1, ge=1)
    rejoin: Literal["next-checkpoint", "never"] = "next-checkpoint"
    log_policies: tuple[LogPolicy, ...] = _LOG_POLICIES

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("log_policies"), list):
            data = {**data, "log_policies": tuple(data["log_policies"])}
        return data


Tracker = Literal["tensorboard", "trackio", "wandb", "mlflow", "aim", "swanlab"]


class Tracking(ConfigModel):
    """What is written down beside the metrics. `eval_every_steps` 0: only before the first and after the last step.

    `to`: the trackers that the controller sends the metrics to. It stands here and not in cluster.toml because it goes with the run: a
    recovery and `homelab track` find it in run.json. [tracking] is no part of the law's hash, so it may change at any time.
    """

    tensorboard: bool = True
    eval_every_steps: int = Field(default=0, ge=0)
    to: tuple[Tracker, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("to"), list):
            data = {**data, "to": tuple(data["to"])}
        return data

    @field_validator("to")
    @classmethod
    def _each_once(cls, to: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        if len(set(to)) < len(to):
            raise ValueError("each tracker once")
        return to
