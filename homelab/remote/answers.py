"""What each verb of the agent may answer. A node that says anything else is not believed: its words become paths and commands here."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from homelab.facts.data_sample import SampleResult
from homelab.facts.network import PacketSent
from homelab.facts.node import Facts
from homelab.models import WireModel
from homelab.protocol.layout import USABLE_NAME
from homelab.provision.node_state import Made, ModelState, NodeState, Received, Removed, Shared
from homelab.results.answers_of_nodes import ResultFiles, Results
from homelab.runs.owner_reply import Owner
from homelab.runs.poll_reply import Energies, ExitOrNone, Line, MomentOrNone, Reply, SupervisorReply

RunName = Annotated[str, Field(pattern=f"^(?:{USABLE_NAME})\\z", max_length=200)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class KnownRun(WireModel):
    """A run of which the node has a folder."""

    name: RunName
    created_at: MomentOrNone = None
    attempt: int = 0
    alive: bool = False
    exit: ExitOrNone = None
    final: bool = False
    busy: Line = ""


class Runs(WireModel):
    """`runs`."""

    runs: tuple[KnownRun, ...]
    secrets_removed: tuple[RunName, ...] = ()


class RunFolder(WireModel):
    """How large a run's folder is, whether a trained model is in it, and who is at work on it."""

    bytes: Annotated[int, Field(ge=0)]
    final: bool
    busy: Line


class RunFolders(WireModel):
    """`run-weigh`."""

    runs: dict[RunName, RunFolder]


class Described(WireModel):
    """`describe`: run.json and the plans by number of attempt, None where the node has none."""

    run_json: dict[str, Any] | None
    plans: dict[Annotated[int, Field(ge=1)], dict[str, Any] | None]


class Stopped(WireModel):
    """`stop`."""

    asked: int
    killed: int
    left: tuple[int, ...]
    as_nodes: tuple[Line, ...] = ()


class Holder(WireModel):
    """Who has a run, or has started another one. `process` is read by `homelab.runs.process_owner`."""

    run: RunName
    token: Annotated[str, Field(max_length=200)]
    by: Annotated[Line, Field(max_length=400)]
    doing: Annotated[Line, Field(max_length=100)]
    age_s: Seconds
    process: dict[str, Any]
    is_started: bool


class Claimed(WireModel):
    """`claim`."""

    holder: Holder | None
    newest: Annotated[int, Field(ge=0)] = 0


class Stacks(WireModel):
    """`stacks`."""

    ranks: dict[int, tuple[Line, ...]]
    cards: tuple[Line, ...] = ()
    dumps: tuple[Line, ...] = ()


class Port(WireModel):
    """`free-port`."""

    port: Annotated[int, Field(ge=1, le=65535)]


class Dial(WireModel):
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


class Dials(WireModel):
    """A line of `meet`."""

    links: tuple[Dial, ...]
    counted: dict[str, Annotated[int, Field(ge=0)]] = {}
    dropped: Annotated[int, Field(ge=0)] = 0


class HasFile(WireModel):
    """`has-file`."""

    found: bool
    differs: bool


class Shards(WireModel):
    """The parts of a checkpoint that a node has."""

    of: Annotated[int, Field(ge=1, le=65536)]
    held: tuple[Annotated[int, Field(ge=0, le=65535)], ...]


class Checkpoints(WireModel):
    """`checkpoints`. `shards`: step -> what the node has of it, where that is not all."""

    good: tuple[Annotated[int, Field(ge=0)], ...]
    bad: dict[str, str]
    shards: dict[str, Shards] = {}


class Answer(WireModel):
    """`chat`."""

    answer: str


class DryRunResult(WireModel):
    """One situation of a `dry-run`."""

    peak_bytes: Annotated[int, Field(ge=0)]
    at: Annotated[str, Field(max_length=200)]
    items: dict[str, Annotated[int, Field(ge=0)]]
    seconds: Seconds


class DryRuns(WireModel):
    """`dry-run`: in the order of the situations, fewer when the time was over."""

    results: tuple[DryRunResult, ...]


class CollectiveRank(WireModel):
    """What one rank of the collective smoke test wrote down. `results` are checked where they are read."""

    stage: Annotated[str, Field(max_length=100)] = "starting"
    error: Annotated[str, Field(max_length=4000)] | None = None
    results: tuple[dict[str, Any], ...] | None = None
    stack: tuple[str, ...] = ()


Ranks = dict[Annotated[int, Field(ge=0)], CollectiveRank]


class CollectiveEnded(WireModel):
    """How torchrun ended on a node, and what is left of it."""

    returncode: int | None = None
    left: tuple[int, ...] = ()
    log: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


class CollectiveLine(WireModel):
    """One line of `collective`."""

    phase: Annotated[str, Field(max_length=100)]
    ranks: Ranks
    ended: CollectiveEnded | None = None


class CollectiveLook(WireModel):
    """`collective-look`."""

    phase: Annotated[str, Field(max_length=100)]
    ranks: Ranks
    log: tuple[str, ...]


class SampleOfData(WireModel):
    """`sample-data`: None where nothing is kept and nothing was to be read."""

    sample: SampleResult | None


class Manifest(WireModel):
    """`manifest`."""

    recipe_hash: Annotated[str, Field(max_length=200)] | None
    path: Annotated[str, Field(max_length=4096)]
    files: dict[Annotated[str, Field(max_length=300)], Annotated[str, Field(max_length=100)]] = Field(default_factory=dict)


class SupervisorNeeds(WireModel):
    """`supervisor-needs`."""

    python: Annotated[str, Field(max_length=4096)]
    version: tuple[int, int, int]
    packages: dict[Annotated[str, Field(max_length=100)], Annotated[str, Field(max_length=100)]]


class Barrier(WireModel):
    """Why a node cannot be reached from another one (`homelab.errors` has the first three fields)."""

    message: Annotated[str, Field(max_length=4000)]
    where: Annotated[str, Field(max_length=4000)]
    hint: Annotated[str, Field(max_length=4000)]
    is_login: bool


class SupervisorReach(WireModel):
    """`supervisor-reach`."""

    errors: dict[str, Barrier | None]


class SupervisorStarted(WireModel):
    """`supervisor-start`."""

    log: Annotated[str, Field(max_length=4096)]


class SupervisorLook(WireModel):
    """`supervisor-look`."""

    supervisor: SupervisorReply | None
    owner: Owner = Owner()


class SupervisorEnded(WireModel):
    """`supervisor-end`."""

    was_alive: bool
    left: tuple[int, ...]


SHAPES: dict[str, type[BaseModel]] = {
    "facts": Facts, "wake": PacketSent, "poll": Reply, "runs": Runs, "describe": Described, "stop": Stopped, "undo": Stopped, "claim": Claimed, "stacks": Stacks,
    "free-port": Port, "meet": Dials, "has-file": HasFile, "checkpoints": Checkpoints, "chat": Answer, "dry-run": DryRuns, "sample-data": SampleOfData,
    "collective-look": CollectiveLook, "collective-end": Stopped, "manifest": Manifest, "energies": Energies,
    "supervisor-needs": SupervisorNeeds, "supervisor-reach": SupervisorReach, "supervisor-start": SupervisorStarted,
    "run-weigh": RunFolders, "result-files": ResultFiles, "result-look": Results, "supervisor-look": SupervisorLook, "supervisor-end": SupervisorEnded,
    "model-look": ModelState, "model-receive": Received, "setup-look": NodeState, "setup-receive": Received, "setup-fetch": Received, "setup-share": Shared,
    "setup-make": Made, "setup-remove": Removed,
}  # fmt: skip


def without_damage(verb: str, answer: Any) -> Any:
    """The answer without what damaged files on the node gave to it, where it is used as it is; `poll` is read through its models."""
    try:
        return Runs.model_validate(answer).model_dump() if verb == "runs" else answer
    except ValidationError:
        return answer


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
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{where}{': ' if where else ''}{message[0].lower()}{message[1:]}"
    return None
