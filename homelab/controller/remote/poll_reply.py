"""What one node's agent answers about a run (`homelab.node.run.poll` writes this JSON; here it gets types). Pure.

Every text that a program on a node wrote is made harmless while it is read: escape sequences and control characters are
taken out, and of a progress bar that redrew itself with carriage returns only the last picture is kept.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain, plain_lines
from homelab.controller.facts.gpu import GpuFacts
from homelab.controller.remote.owner_reply import Owner

# The year 3000: no run of ours was then, and no calendar has to show what a damaged file says.
LATEST = 32_503_680_000.0
MOST_RANKS = 4096
_MOST_LINES = 50_000  # twice what a node sends at once (`homelab.node.run.poll`), and some


def is_moment(value: Any) -> bool:
    """Whether this can be a time in seconds since 1970."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LATEST


def or_none(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    """A damaged file on a node gives no value; the rest of the node's answer stays."""
    try:
        return read(value)
    except ValidationError:
        return None


def _readable_metrics(lines: Any) -> Any:
    """Without the lines of a damaged metrics.jsonl."""
    return [line for line in lines if is_metric(line)] if isinstance(lines, list) else lines


def is_metric(line: Any) -> bool:
    """Whether this can be a line of metrics.jsonl."""
    try:
        Metric.model_validate(line)
    except ValidationError:
        return False
    return True


Line = Annotated[str, AfterValidator(plain)]
Lines = Annotated[str, AfterValidator(plain_lines)]
LineOrEmpty = Annotated[str, WrapValidator(lambda value, read: or_none(value, read) or ""), AfterValidator(plain)]
Moment = Annotated[float, Field(ge=0, lt=LATEST, allow_inf_nan=False)]
Number = Annotated[int, Field(ge=0, lt=2**63)]
Tail = Annotated[tuple[Line, ...], Field(max_length=50_000)]
Rank = Annotated[int, Field(ge=0, lt=65536)]
Finite = Annotated[float | None, AfterValidator(lambda value: value if value is not None and math.isfinite(value) else None)]


class Heartbeat(WireModel):
    """A rank's sign of life. `time` is the node's own clock, in seconds since 1970."""

    time: Moment
    # starting | loading | fetching (a checkpoint, from a peer) | training | saving | evaluating | done
    phase: Line = "starting"
    step: Number = 0
    total_steps: Number | None = None
    step_tokens: Finite = None
    done: Finite = None  # 0 to 1, where the phase knows its end
    pid: int | None = None


class Metric(WireModel):
    """One line of metrics.jsonl. Loss is the global mean per token; tokens and seconds are this rank's own."""

    kind: str  # train | eval | note | shares | save
    time: Moment = 0.0
    attempt: Number = 0
    rank: Number = 0
    node: LineOrEmpty = ""
    step: Number = 0
    epoch: Finite = None
    loss: float | None = None  # not finite where the training has diverged
    eval_loss: float | None = None
    tokens: Number | None = None
    tokens_per_s: Finite = None
    learning_rate: Finite = None
    compute_s: Finite = None
    communication_s: Finite = None
    input_s: Finite = None
    step_s: Finite = None
    memory_bytes: Number | None = None
    share: Number | None = None
    message: Lines = ""


class LogTail(WireModel):
    """The last lines of what a worker printed."""

    stdout: Tail = ()
    stderr: Tail = ()


class RankError(WireModel):
    """What the worker itself wrote down before it ended: what was seen, where, and what fixes it.

    `needs_launch`: the fix changes the recipe, so it is a new training.
    """

    message: Lines
    where: Lines = ""
    hint: Lines = ""
    needs_launch: bool = False


class RankReply(WireModel):
    """One worker process. `metrics` may be only the lines that are newer than those already asked for."""

    heartbeat: Annotated[Heartbeat | None, WrapValidator(or_none)] = None
    metrics: Annotated[tuple[Metric, ...], BeforeValidator(_readable_metrics)] = ()
    # the curves up to the step from which this attempt went on, where they were asked for
    before: Annotated[tuple[Metric, ...], BeforeValidator(_readable_metrics)] = ()
    log_tail: LogTail = LogTail()
    error: Annotated[RankError | None, WrapValidator(or_none)] = None


class Exit(WireModel):
    """How torchrun ended on this node. `stopped` says that it was asked to; `error` why it could not even start.

    `alone`: the node ended it by itself, because it had lost the controller and the other nodes.
    """

    returncode: int | None = None
    signal: int | None = None
    ended_at: Moment | None = None
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


ExitOrNone = Annotated[Exit | None, WrapValidator(or_none)]
NumberOrNone = Annotated[Number | None, WrapValidator(or_none)]
MomentOrNone = Annotated[Moment | None, WrapValidator(or_none)]


class RunReply(WireModel):
    """What a node knows of one run, in its newest attempt. Attempt 0: the folder is there, nothing was started."""

    name: str
    attempt: int = 0
    agent_alive: bool = False
    torchrun_alive: bool = False
    processes: int = 0
    exit: ExitOrNone = None
    started_at: MomentOrNone = None
    rebooted: bool | None = None  # the machine was restarted since; None where that is unknown
    stop_marked_at: MomentOrNone = None  # homelab was about to end it here: its exit record follows, or could not be written
    ranks: dict[Rank, RankReply] = Field(default_factory=dict, max_length=MOST_RANKS)
    more: bool = False  # metrics that are asked for next
    torchrun_tail: Tail = ()
    checkpoints: Annotated[tuple[Number, ...], Field(max_length=100_000)] = ()
    final: bool = False
    secrets_removed: bool = False

    @model_validator(mode="before")
    @classmethod
    def _bounded(cls, value: Any) -> Any:
        """Before an object is made of any of it."""
        ranks = value.get("ranks") if isinstance(value, dict) else None
        entries = [rank for rank in ranks.values() if isinstance(rank, dict)] if isinstance(ranks, dict) else []
        lines = sum(len(part) for rank in entries for part in (rank.get("metrics"), rank.get("before")) if isinstance(part, list))
        if len(entries) > MOST_RANKS or lines > _MOST_LINES:
            raise ValueError(f"it has {len(entries)} ranks with {lines} lines of metrics")
        return value

    @property
    def is_alive(self) -> bool:
        """Something of this attempt still runs on the node, or is about to."""
        return self.exit is None and (self.agent_alive or self.torchrun_alive)


class CardJoules(WireModel):
    """What one card used while an attempt ran on its node. `joules` is None where it does not tell its power.

    `measured_s` is the time between samples, `unmeasured_s` that of gaps between them.
    """

    index: Number
    uuid: Line = ""
    name: Line = ""
    joules: Annotated[float | None, Field(ge=0, lt=1e15, allow_inf_nan=False)] = None
    measured_s: Annotated[float, Field(ge=0, lt=LATEST, allow_inf_nan=False)] = 0.0
    unmeasured_s: Annotated[float, Field(ge=0, lt=LATEST, allow_inf_nan=False)] = 0.0


class Energies(WireModel):
    """`energies`, the answer of a node: number of the attempt -> its cards."""

    attempts: Annotated[
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[list[CardJoules], Field(max_length=64)]], Field(max_length=10_000)
    ]


class NodeLoad(WireModel):
    """How busy the machine is. Bytes of the network are counted since it started, `counted_at_s` by its monotonic clock."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes: NumberOrNone = None
    sent_bytes: NumberOrNone = None
    counted_at_s: Finite = None


class Event(WireModel):
    """One line of a supervisor's events.jsonl; `time` in seconds since 1970, by the clock of its node."""

    time: Moment
    what: Line
    event: Line = ""
    attempt: int | None = None
    step: int | None = None
    state: Line = ""
    title: Line = ""
    kind: Line = ""
    because: Line = ""
    cause: Line | None = None
    hint: Line | None = None
    nodes: tuple[Line, ...] = ()
    left_out: tuple[Line, ...] = ()
    ranks: tuple[int, ...] = ()
    saved: Line = ""


def event_of(line: dict[str, Any]) -> dict[str, Any] | None:
    """What a supervisor on a node wrote down, made harmless; None when it is not whole."""
    try:
        return Event.model_validate(line).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return None


class SupervisorReply(WireModel):
    """The run's supervisor, where it was put on this node: whether it is at work, and what it said last. `frozen`: a signal has stopped it."""

    alive: bool
    frozen: bool = False
    doing: LineOrEmpty = ""
    why: LineOrEmpty = ""
    pid: Annotated[int | None, WrapValidator(or_none)] = None
    log: Line = ""
    events: Annotated[tuple[dict[str, Any], ...], Field(max_length=10_000)] = ()  # to be read by `event_of`

    def __str__(self) -> str:
        return self.doing if self.doing in ("", "watching") else f"{self.doing}: {self.why}"


class Reply(WireModel):
    """One node's answer. `run` is None where the node does not know the run; `time` is the node's own clock."""

    node: Line
    time: float = Field(allow_inf_nan=False)
    hostname: Line = ""
    load: NodeLoad = Field(default_factory=NodeLoad)
    gpus: Annotated[tuple[GpuFacts, ...], Field(max_length=256)] = ()
    run: RunReply | None = None
    supervisor: SupervisorReply | None = None
    owner: Owner | None = None


def parse_replies(raw: dict[str, dict[str, Any]]) -> dict[str, Reply]:
    """Node -> its answer, from decoded JSON. Raises pydantic.ValidationError when an agent speaks another language."""
    return {node: Reply.model_validate(reply) for node, reply in raw.items()}
