"""The messages that the node program writes about runs and their supervisors, as JSON objects (the others: `machine_messages`).
The controller validates them (`homelab.controller.remote.poll_reply`, `homelab.controller.attempt.node_status`, `homelab.controller.remote.answers`) before it believes a word.
Times are seconds since 1970 by the node's own clock; ages (`..._s`) are counted by its monotonic clock.
"""

from __future__ import annotations

from typing import Any, TypedDict

from homelab.shared.protocol.machine_messages import Json, MachineLoad
from homelab.shared.protocol.owner_messages import Owner


class Exit(TypedDict, total=False):
    """exit.json: how torchrun ended on a node. `stopped`: as asked; `error`: it could not start; `alone`: why the node ended it by itself."""

    returncode: int | None
    signal: int | None
    ended_at: float
    stopped: bool
    error: str
    alone: str | None


class RankStatus(TypedDict):
    """One rank in a line of `follow`. `state` is the kernel's letter, "" for a process that is gone."""

    pid: int | None
    state: str
    phase: str
    step: int
    still_s: float  # since the last sign of life
    step_still_s: float  # since the last step
    error: bool


class NodeStatus(TypedDict, total=False):
    """A line of `follow`. `missing_s`: node that this one once reached -> since when it does not any more."""

    attempt: int
    newest: int
    started: bool
    stopping: bool
    agent: str
    torchrun: str
    exit: Json | None
    checkpoint: int
    ranks: dict[str, RankStatus]
    missing_s: dict[str, float]


class RankReply(TypedDict):
    """One rank in the answer of `poll`, as it wrote it: heartbeat.json, lines of metrics.jsonl, the last lines of its logs, error.json."""

    heartbeat: Json | None
    metrics: list[Json]
    before: list[Json]
    log_tail: dict[str, list[str]]
    error: Json | None


class RunReply(TypedDict, total=False):
    """A run in the answer of `poll`, in its newest attempt; attempt 0: the folder is there, nothing was started."""

    name: str
    as_node: str  # the name under which this machine takes part
    attempt: int
    agent_alive: bool
    torchrun_alive: bool
    processes: int
    exit: Json | None
    started_at: float | None
    rebooted: bool | None
    stop_marked_at: float | None
    ranks: dict[str, RankReply]
    more: bool  # not all new lines of metrics.jsonl are in it
    torchrun_tail: list[str]
    checkpoints: list[int]
    final: bool
    secrets_removed: bool


class SupervisorReply(TypedDict, total=False):
    """The run's supervisor that was placed on this node: what supervisor.json and events.jsonl say, and whether it has its lock."""

    alive: bool
    frozen: bool
    doing: str
    why: str
    attempt: int
    pid: int
    log: str
    events: list[Json]


class PollReply(MachineLoad, total=False):
    """The answer of `poll`. `run` is None where the node does not know the run."""

    node: str
    time: float
    run: RunReply | None
    supervisor: SupervisorReply | None
    owner: Owner | None


class KnownRun(TypedDict):
    """A run in the answer of `runs`."""

    name: str
    created_at: Any
    attempt: int
    alive: bool
    exit: Json | None
    final: bool
    busy: str  # who is at work on it; "" for nobody


class Runs(TypedDict):
    """The answer of `runs`."""

    runs: list[KnownRun]
    secrets_removed: list[str]


class Described(TypedDict):
    """The answer of `describe`: run.json and the plans by number of attempt."""

    run_json: Json | None
    plans: dict[str, Json | None]


class CardEnergy(TypedDict):
    """What one card used in an attempt: joules (None: it does not tell its power), and the seconds that were and were not measured."""

    index: int
    uuid: str
    name: str
    joules: float | None
    measured_s: float
    unmeasured_s: float


class Energies(TypedDict):
    """The answer of `energies`: number of the attempt -> cards."""

    attempts: dict[str, list[CardEnergy]]


class Stopped(TypedDict, total=False):
    """The answer of `stop` and `undo`: processes that were asked to end, killed, and are still there."""

    asked: int
    killed: int
    left: list[int]
    as_nodes: list[str]


class HasFile(TypedDict):
    """The answer of `has-file`: it is there with the content it was sent with, or with another one."""

    found: bool
    differs: bool
    path: str


class Shards(TypedDict):
    """The parts of a checkpoint that a folder has, counted from 0, and how many there are."""

    of: int
    held: list[int]


class Checkpoints(TypedDict, total=False):
    """The answer of `checkpoints`: steps. Those older than the newest good one are read only where each node has its own part (`shards`, by step)."""

    good: list[int]
    bad: dict[str, str]
    run_known: bool
    shards: dict[str, Shards]


class Manifest(TypedDict):
    """The answer of `manifest`."""

    recipe_hash: Any
    path: str
    files: dict[str, str]
    sizes: dict[str, int]


class Stacks(TypedDict):
    """The answer of `stacks`."""

    ranks: dict[str, list[str]]
    cards: list[str]
    dumps: list[str]


class SupervisorNeeds(TypedDict):
    """The answer of `supervisor-needs`. `packages`: those that were asked for and are there, with their versions."""

    python: str
    version: list[int]
    packages: dict[str, str]


class Barrier(TypedDict):
    """Why a node cannot be reached from another one: an error's three parts. `is_login`: it answers, and no key opens it."""

    message: str
    where: str
    hint: str
    is_login: bool


class SupervisorReach(TypedDict):
    """The answer of `supervisor-reach`: by node, None where nothing is in the way."""

    errors: dict[str, Barrier | None]


class SupervisorStarted(TypedDict):
    """The answer of `supervisor-start`: the path of its log."""

    log: str


class SupervisorLook(TypedDict):
    """The answer of `supervisor-look`. None: no supervisor was ever placed here."""

    supervisor: SupervisorReply | None
    owner: Owner


class SupervisorEnded(TypedDict):
    """The answer of `supervisor-end`. `left`: processes that do not end."""

    was_alive: bool
    left: list[int]


class SetupState(TypedDict):
    """The answer of `setup-look`: what of a worker environment is there. `pythons`: "3.12" -> path; `good`, `partial`: of the files asked for."""

    machine: str
    libc: str
    pythons: dict[str, str]
    environment_exists: bool
    environment_is_ours: bool
    environment_python: str
    packages: dict[str, str]
    lock: str
    good: list[str]
    partial: dict[str, int]
    disk_free: int
    folders: list[str]


class ModelState(TypedDict):
    """The answer of `model-look`: which files of the model are in its folder, which differ that setup has not brought, and how many bytes of others."""

    folder: str
    good: list[str]
    others: list[str]
    partial: dict[str, int]
    disk_free: int


class SetupReceived(TypedDict):
    """The answer of `setup-receive`, `setup-fetch` and `model-receive`: how many bytes of the file are there."""

    have: int


class SetupMade(TypedDict):
    """The answer of `setup-make`: what is installed now, and the last words of uv."""

    packages: dict[str, str]
    said: list[str]


class SetupRemoved(TypedDict):
    """The answer of `setup-remove`: folders."""

    removed: list[str]
    left: list[str]
