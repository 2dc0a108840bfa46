"""The messages of the node program about a run and its supervisor. Times are seconds since 1970 by the node's own clock."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from homelab.shared.markers import Above, AtLeast, Below, Longest, Matches
from homelab.shared.protocol.card_messages import GpuFacts
from homelab.shared.protocol.house_messages import HouseOrNone
from homelab.shared.protocol.marks import (
    FEW_LINES,
    FINITE,
    LATEST,
    MOST_ATTEMPTS,
    MOST_NODES,
    MOST_RANKS,
    MOST_RUNS,
    OR_NONE,
    PLAIN,
    Attempt,
    Count,
    CountOrNone,
    Duration,
    Json,
    Line,
    LineOrEmpty,
    Lines,
    Moment,
    MomentOrNone,
    Number,
    Pids,
    Rank,
    RunName,
    Seconds,
    Tail,
)
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.owner_messages import Owner
from homelab.shared.protocol.rank_messages import RankReply, RankStatus


class Exit(Message):
    """exit.json: how torchrun ended on a node. `stopped`: as asked; `error`: why it could not even start.

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


ExitOrNone = Annotated[Optional[Exit], OR_NONE]


class StatusLine(Message):
    """A line of `follow`."""

    attempt: Count
    newest: Count = 0
    started: bool = False
    stopping: bool = False  # a stop was asked for: `homelab.node.run.torchrun.mark_stop` comes before any signal
    agent: str = ""
    torchrun: str = ""
    exit: ExitOrNone = None
    checkpoint: Count = 0  # step of the newest one that is complete on this node
    ranks: Annotated[dict[Rank, RankStatus], Longest(MOST_RANKS)] = {}
    # node that this one once reached -> for how long it has not any more (`homelab.node.run.peer_probe`)
    missing_s: Annotated[dict[str, float], Longest(MOST_NODES)] = {}
    house: HouseOrNone = None  # whether its owner is there; None before the first look


class RunReply(Message):
    """A run in the answer of `poll`, in its newest attempt. Attempt 0: the folder is there, nothing was started."""

    MARKS = (FEW_LINES,)
    name: str
    as_node: Annotated[str, Longest(200), PLAIN] = ""  # the name under which this machine takes part, whatever it is called today
    attempt: int = 0
    agent_alive: bool = False
    torchrun_alive: bool = False
    processes: int = 0
    exit: ExitOrNone = None
    started_at: MomentOrNone = None
    rebooted: bool | None = None  # the machine was restarted since; None where that is unknown
    stop_marked_at: MomentOrNone = None  # homelab was about to end it here: its exit record follows, or could not be written
    ranks: Annotated[dict[Rank, RankReply], Longest(MOST_RANKS)] = {}
    more: bool = False  # metrics that are asked for next
    torchrun_tail: Tail = ()
    checkpoints: Annotated[tuple[Count, ...], Longest(100_000)] = ()
    final: bool = False
    secrets_removed: bool = False

    @property
    def is_alive(self) -> bool:
        """Something of this attempt still runs on the node, or is about to."""
        return self.exit is None and (self.agent_alive or self.torchrun_alive)


class SupervisorReply(Message):
    """The run's supervisor that was placed on this node: whether it is at work, and what it said last. `frozen`: a signal has stopped it."""

    alive: bool
    frozen: bool = False
    doing: LineOrEmpty = ""
    why: LineOrEmpty = ""
    pid: Annotated[int | None, OR_NONE] = None
    log: Line = ""
    events: Annotated[tuple[dict[str, Any], ...], Longest(10_000)] = ()  # to be read by `homelab.controller.remote.poll_reply.event_of`

    def __str__(self) -> str:
        return self.doing if self.doing in ("", "watching") else f"{self.doing}: {self.why}"


class SupervisorLook(Message):
    """The answer of `supervisor-look`. None: no supervisor was ever placed here."""

    supervisor: SupervisorReply | None
    owner: Owner = Owner()


class KnownRun(Message):
    """A run of which the node has a folder, in the answer of `runs`."""

    name: RunName
    created_at: MomentOrNone = None
    attempt: Attempt = 0
    alive: bool = False
    exit: ExitOrNone = None
    final: bool = False
    busy: Line = ""  # who is at work on it; "" for nobody


class Runs(Message):
    """The answer of `runs`."""

    runs: Annotated[tuple[KnownRun, ...], Longest(MOST_RUNS)]
    secrets_removed: Annotated[tuple[RunName, ...], Longest(MOST_RUNS)] = ()


class Described(Message):
    """The answer of `describe`: run.json and the plans by number of attempt, None where the node has none."""

    run_json: Json | None
    plans: Annotated[dict[Annotated[int, AtLeast(1), Below(10**9)], Json | None], Longest(MOST_ATTEMPTS)]


class Stopped(Message):
    """The answer of `stop`, `undo` and `collective-end`: processes that were asked to end, killed, and are still there."""

    asked: Count
    killed: Count
    left: Pids
    as_nodes: Annotated[tuple[Annotated[str, Longest(200), PLAIN], ...], Longest(MOST_NODES)] = ()


class Preparation(Message):
    """The answer of `prepare`: whether processes wait here for the next attempt; "begun": they do their imports."""

    state: Literal["none", "begun", "ready"]


class Stacks(Message):
    """The answer of `stacks`."""

    ranks: Annotated[dict[Rank, Tail], Longest(MOST_RANKS)]
    cards: Tail = ()
    dumps: Tail = ()


class RunAtWork(Message):
    """What a run that is alive does on a node, in the answer of `facts`. `has_ended`: its attempt is over, and processes of it are left. `still_s`:
    since the last sign of a rank here; `step_s`: of the last steps. None: it does not say. `owner`: who looks after it, "" for nobody."""

    has_ended: bool = False
    phase: Annotated[str, Longest(40)] = ""
    step: Count | None = None
    total_steps: Count | None = None
    step_s: Annotated[float, Above(0), FINITE] | None = None
    still_s: Duration | None = None
    owner: Annotated[str, Longest(500)] = ""


class RunRecovered(Message):
    """The supervisor of a run that is between two attempts, in the answer of `facts`. `process` is read by `homelab.controller.run.process_owner`."""

    by: Annotated[str, Longest(400), PLAIN] = ""
    process: Json = {}


class NodeLoad(Message):
    """How busy a machine is; None where it does not tell. Bytes of the network are counted since it started, `counted_at_s` by its monotonic clock."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    received_bytes: CountOrNone = None
    sent_bytes: CountOrNone = None
    counted_at_s: Number = None


class Reply(Message):
    """The answer of `poll`. `run` is None where the node does not know the run; `time` is the node's own clock."""

    node: Line
    time: Seconds
    hostname: Line = ""
    load: NodeLoad = NodeLoad()
    gpus: Annotated[tuple[GpuFacts, ...], Longest(256)] = ()
    run: RunReply | None = None
    supervisor: SupervisorReply | None = None
    owner: Owner | None = None


class CardJoules(Message):
    """What one card used while an attempt ran on its node. `joules` is None where it does not tell its power.

    `measured_s` is the time between samples, `unmeasured_s` that of gaps between them.
    """

    index: Count
    uuid: Line = ""
    name: Line = ""
    joules: Annotated[Duration, Below(1e15)] | None = None
    measured_s: Annotated[Duration, Below(LATEST)] = 0.0
    unmeasured_s: Annotated[Duration, Below(LATEST)] = 0.0


class Energies(Message):
    """The answer of `energies`: number of the attempt -> its cards."""

    attempts: Annotated[
        dict[Annotated[str, Matches(r"^[0-9]{1,9}$")], Annotated[tuple[CardJoules, ...], Longest(64)]], Longest(MOST_ATTEMPTS)
    ]
