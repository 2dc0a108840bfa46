"""What each verb of the agent may answer. A node that says anything else is not believed: its words become paths and commands here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from homelab.checks.sample_result import SampleResult
from homelab.facts import Facts, Loose
from homelab.runs import reply
from homelab.runs.reply import Exit, Line, Moment, Reply, SupervisorReply
from homelab.runs.store import USABLE_NAME

RunName = Annotated[str, Field(pattern=f"^(?:{USABLE_NAME})\\z", max_length=200)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KnownRun(Loose):
    """A run of which the node has a folder."""

    name: RunName
    created_at: Moment | None = None
    attempt: int = 0
    alive: bool = False
    exit: Exit | None = None
    final: bool = False


class Runs(Loose):
    """`runs`."""

    runs: tuple[KnownRun, ...]
    secrets_removed: tuple[RunName, ...] = ()


class Described(Loose):
    """`describe`: run.json and the plans by number of attempt, None where the node has none."""

    run_json: dict[str, Any] | None
    plans: dict[Annotated[int, Field(ge=1)], dict[str, Any] | None]


class Stopped(Loose):
    """`stop`."""

    asked: int
    killed: int
    left: tuple[int, ...]
    as_nodes: tuple[Line, ...] = ()


class Holder(Loose):
    """Who has a run, or has started another one. `process` is read by `homelab.runs.owner`."""

    run: RunName
    token: Annotated[str, Field(max_length=200)]
    by: Annotated[Line, Field(max_length=400)]
    doing: Annotated[Line, Field(max_length=100)]
    age_s: Seconds
    process: dict[str, Any]
    is_started: bool


class Claimed(Loose):
    """`claim`."""

    holder: Holder | None
    newest: Annotated[int, Field(ge=0)] = 0


class Stacks(Loose):
    """`stacks`."""

    ranks: dict[int, tuple[Line, ...]]
    cards: tuple[Line, ...] = ()
    dumps: tuple[Line, ...] = ()


class Port(Loose):
    """`free-port`."""

    port: Annotated[int, Field(ge=1, le=65535)]


class Dial(Loose):
    """One dial of `meet`, or what it measured of one pair (`homelab.checks.evidence.Link` has the fields)."""

    node: str
    address: str
    port: int
    latency_ms: Milliseconds | None = None
    median_ms: Milliseconds | None = None
    worst_ms: Milliseconds | None = None
    throughput_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stalled: Line | None = None
    carried_bytes: int | None = None
    lost_bytes: int | None = None
    repeats: Annotated[int, Field(ge=0)] = 0
    sent: Annotated[int, Field(ge=0)] | None = None
    error: Line | None = None


class Dials(Loose):
    """A line of `meet`."""

    links: tuple[Dial, ...]
    counted: dict[str, Annotated[int, Field(ge=0)]] = {}
    dropped: Annotated[int, Field(ge=0)] = 0


class HasFile(Loose):
    """`has-file`."""

    found: bool
    differs: bool


class Checkpoints(Loose):
    """`checkpoints`."""

    good: tuple[Annotated[int, Field(ge=0)], ...]
    bad: dict[str, str]


class Answer(Loose):
    """`chat`."""

    answer: str


class DryRunResult(Loose):
    """One situation of a `dry-run`."""

    peak_bytes: Annotated[int, Field(ge=0)]
    at: Annotated[str, Field(max_length=200)]
    items: dict[str, Annotated[int, Field(ge=0)]]
    seconds: Seconds


class DryRuns(Loose):
    """`dry-run`: in the order of the situations, fewer when the time was over."""

    results: tuple[DryRunResult, ...]


class CollectiveRank(Loose):
    """What one rank of the collective smoke test wrote down. `results` are checked where they are read."""

    stage: Annotated[str, Field(max_length=100)] = "starting"
    error: Annotated[str, Field(max_length=4000)] | None = None
    results: tuple[dict[str, Any], ...] | None = None
    stack: tuple[str, ...] = ()


Ranks = dict[Annotated[int, Field(ge=0)], CollectiveRank]


class CollectiveEnded(Loose):
    """How torchrun ended on a node, and what is left of it."""

    returncode: int | None = None
    left: tuple[int, ...] = ()
    log: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


class CollectiveLine(Loose):
    """One line of `collective`."""

    phase: Annotated[str, Field(max_length=100)]
    ranks: Ranks
    ended: CollectiveEnded | None = None


class CollectiveLook(Loose):
    """`collective-look`."""

    phase: Annotated[str, Field(max_length=100)]
    ranks: Ranks
    log: tuple[str, ...]


class SampleOfData(Loose):
    """`sample-data`: None where nothing is kept and nothing was to be read."""

    sample: SampleResult | None


class Manifest(Loose):
    """`manifest`."""

    recipe_hash: Annotated[str, Field(max_length=200)] | None
    path: Annotated[str, Field(max_length=4096)]
    files: dict[Annotated[str, Field(max_length=300)], Annotated[str, Field(max_length=100)]] = Field(default_factory=dict)


class SupervisorNeeds(Loose):
    """`supervisor-needs`."""

    python: Annotated[str, Field(max_length=4096)]
    version: tuple[int, int, int]
    missing: tuple[Annotated[str, Field(max_length=100)], ...]


class Barrier(Loose):
    """Why a node cannot be reached from another one (`homelab.errors` has the first three fields)."""

    message: Annotated[str, Field(max_length=4000)]
    where: Annotated[str, Field(max_length=4000)]
    hint: Annotated[str, Field(max_length=4000)]
    is_login: bool


class SupervisorReach(Loose):
    """`supervisor-reach`."""

    errors: dict[str, Barrier | None]


class SupervisorStarted(Loose):
    """`supervisor-start`."""

    log: Annotated[str, Field(max_length=4096)]


class SupervisorLook(Loose):
    """`supervisor-look`."""

    supervisor: SupervisorReply | None


class SupervisorEnded(Loose):
    """`supervisor-end`."""

    was_alive: bool
    left: tuple[int, ...]


SHAPES: dict[str, type[BaseModel]] = {
    "facts": Facts, "poll": Reply, "runs": Runs, "describe": Described, "stop": Stopped, "undo": Stopped, "claim": Claimed, "stacks": Stacks, "free-port": Port, "meet": Dials,
    "has-file": HasFile, "checkpoints": Checkpoints, "chat": Answer, "dry-run": DryRuns, "sample-data": SampleOfData,
    "collective-look": CollectiveLook, "collective-end": Stopped, "manifest": Manifest,
    "supervisor-needs": SupervisorNeeds, "supervisor-reach": SupervisorReach, "supervisor-start": SupervisorStarted,
    "supervisor-look": SupervisorLook, "supervisor-end": SupervisorEnded,
}  # fmt: skip


def without_damage(verb: str, answer: Any) -> Any:
    """The answer without what damaged files on the node gave to it: they are no reason to call the node one that cannot be asked."""
    if verb == "poll" and isinstance(answer, dict):
        return reply.without_damage(answer)
    if verb == "runs" and isinstance(answer, dict) and isinstance(answer.get("runs"), list):
        return answer | {"runs": [_run_without_damage(entry) for entry in answer["runs"]]}
    return answer


def _run_without_damage(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    created_at, ended = entry.get("created_at"), reply.whole(Exit, entry.get("exit"))
    known = {"attempt": 0, "alive": False, "final": False} | entry
    return known | {
        "created_at": created_at if reply.is_moment(created_at) else None,
        "exit": ended if ended is None else Exit.model_validate(ended).model_dump(),
    }


def fault(verb: str, answer: Any) -> str | None:
    """None for an answer that can be used, else what is wrong with it."""
    if not isinstance(answer, dict):
        return "it is no JSON object"
    shape = SHAPES.get(verb)
    try:
        if shape is not None:
            shape.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where, what = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{where}{': ' if where else ''}{what[0].lower()}{what[1:]}"
    return None
