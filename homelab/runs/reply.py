"""What one node's agent answers about a run (`homelab.node.poll` writes this JSON; here it gets types).

Every text that a program on a node wrote is made harmless while it is read: escape sequences and control characters are
taken out, and of a progress bar that redrew itself with carriage returns only the last picture is kept.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from homelab.facts import GpuFacts, Loose

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """One line without escape sequences and control characters; tabs become spaces."""
    text = _ESCAPES.sub("", text).rstrip("\r\n")
    text = text[text.rfind("\r") + 1 :]
    return _CONTROLS.sub("", text.expandtabs(4)).rstrip()


def plain_lines(text: str) -> str:
    """Like `plain`, for a text of several lines."""
    return "\n".join(plain(line) for line in text.split("\n")).strip()


Line = Annotated[str, AfterValidator(plain)]
Lines = Annotated[str, AfterValidator(plain_lines)]


class Heartbeat(Loose):
    """A rank's sign of life. `time` is the node's own clock, in seconds since 1970."""

    time: float
    phase: str = "starting"  # starting | loading | fetching (a checkpoint, from a peer) | training | saving | evaluating | done
    step: int = 0
    total_steps: int | None = None
    step_tokens: float | None = None
    done: float | None = None  # 0 to 1, where the phase knows its end
    pid: int | None = None


class Metric(Loose):
    """One line of metrics.jsonl. Loss is the global mean per token; tokens and seconds are this rank's own."""

    kind: str  # train | eval | note | shares | save
    time: float = 0.0
    attempt: int = 0
    rank: int = 0
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    step_s: float | None = None
    memory_bytes: int | None = None
    share: int | None = None
    message: Lines = ""


class LogTail(Loose):
    """The last lines of what a worker printed."""

    stdout: tuple[Line, ...] = ()
    stderr: tuple[Line, ...] = ()


class RankError(Loose):
    """What the worker itself wrote down before it ended: what was seen, where, and what mends it."""

    message: Lines
    where: Lines = ""
    hint: Lines = ""


class RankReply(Loose):
    """One worker process. `metrics` may be only the lines that are newer than those already asked for."""

    heartbeat: Heartbeat | None = None
    metrics: tuple[Metric, ...] = ()
    log_tail: LogTail = LogTail()
    error: RankError | None = None


class Exit(Loose):
    """How torchrun ended on this node. `stopped` says that it was asked to; `error` why it could not even start.

    `alone`: the node ended it by itself, because it had lost the controller and the other nodes.
    """

    returncode: int | None = None
    signal: int | None = None
    ended_at: float | None = None
    stopped: bool = False
    error: Lines | None = None
    alone: Lines | None = None

    @property
    def is_success(self) -> bool:
        """Ended by itself, with exit code 0."""
        return self.returncode == 0 and self.signal is None

    def __str__(self) -> str:
        if self.stopped:
            return "stopped"
        return f"signal {self.signal}" if self.signal is not None else f"exit code {self.returncode}"


class RunReply(Loose):
    """What a node knows of one run, in its newest attempt. Attempt 0: the folder is there, nothing was started."""

    name: str
    attempt: int = 0
    agent_alive: bool = False
    torchrun_alive: bool = False
    exit: Exit | None = None
    started_at: float | None = None
    ranks: dict[int, RankReply] = Field(default_factory=dict)
    torchrun_tail: tuple[Line, ...] = ()
    checkpoints: tuple[int, ...] = ()
    final: bool = False

    @property
    def is_alive(self) -> bool:
        """Something of this attempt still runs on the node, or is about to."""
        return self.exit is None and (self.agent_alive or self.torchrun_alive)


class NodeLoad(Loose):
    """How busy the machine is."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class Event(Loose):
    """One line of a supervisor's events.jsonl; `time` in seconds since 1970, by the clock of its node."""

    time: float = Field(allow_inf_nan=False)
    what: Line
    kind: Line = ""
    because: Line = ""
    cause: Line | None = None
    hint: Line | None = None
    nodes: tuple[Line, ...] = ()
    left_out: tuple[Line, ...] = ()
    ranks: tuple[int, ...] = ()


def event_of(line: dict[str, Any]) -> dict[str, Any] | None:
    """What a supervisor on a node wrote down, made harmless; None when it is not whole."""
    try:
        return Event.model_validate(line).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return None


class SupervisorReply(Loose):
    """The run's supervisor, where it was put on this node: whether it is at work, and what it said last."""

    alive: bool
    doing: Line = ""
    why: Line = ""
    pid: int | None = None
    log: Line = ""
    events: tuple[dict[str, Any], ...] = ()  # to be read by `event_of`

    def __str__(self) -> str:
        return self.doing if self.doing in ("", "watching") else f"{self.doing}: {self.why}"


class Reply(Loose):
    """One node's answer. `run` is None where the node does not know the run; `time` is the node's own clock."""

    node: str
    time: float
    hostname: Line = ""
    load: NodeLoad = Field(default_factory=NodeLoad)
    gpus: tuple[GpuFacts, ...] = ()
    run: RunReply | None = None
    supervisor: SupervisorReply | None = None


def parse_replies(raw: dict[str, dict[str, Any]]) -> dict[str, Reply]:
    """Node -> its answer, from decoded JSON. Raises pydantic.ValidationError when an agent speaks another language."""
    return {node: Reply.model_validate(reply) for node, reply in raw.items()}
