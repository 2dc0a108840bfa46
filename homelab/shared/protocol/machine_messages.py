"""The messages of the node program about its machine, its ports and the dials between nodes, and of the collective smoke test."""

from __future__ import annotations

from typing import Any, TypedDict

Json = dict[str, Any]


class Facts(TypedDict, total=False):
    """The answer of `facts`: one key for each probe of `homelab.node.facts`. `broken`: probe -> its error; its key is missing then."""

    node: str
    broken: dict[str, str]
    system: Json
    resources: Json
    python: Json
    gpu: Json
    amd: list[Json]
    xid: list[Json] | None
    network: Json
    model: Json | None
    speed_profiles: Json | None
    data: dict[str, Json]
    power: Json
    runs: Json
    collective_check: Json | None


class RunRecovered(TypedDict):
    """A run between two attempts, in the answer of `facts`: who its supervisor is, as it says itself."""

    by: str
    process: dict[str, Json]


class RunAtWork(TypedDict):
    """A run that is alive, in the answer of `facts`: how far it is, since when no rank here has spoken, and who looks after it ("" for nobody)."""

    has_ended: bool
    phase: str
    step: int | None
    total_steps: int | None
    step_s: float | None
    still_s: float | None
    owner: str


class Port(TypedDict):
    """The answer of `free-port`."""

    port: int


class PacketSent(TypedDict):
    """The answer of `wake`: whether this node is in that network, and has sent the packet."""

    sent: bool


class Meeting(TypedDict):
    """The first line of `meet`: the ports on which this node listens, None where it cannot."""

    ports: list[int]
    rendezvous: int | None
    udp: int | None
    burst: int | None
    error: str | None


class Dial(TypedDict, total=False):
    """One dial in a line of `meet`, or what was measured of one pair. `repeats`: packets of its handshakes that were sent again."""

    node: str
    address: str
    port: int
    latency_ms: float
    median_ms: float
    worst_ms: float
    throughput_bytes_per_s: float
    stalled: str | None
    carried_bytes: int
    lost_bytes: int
    repeats: int
    sent: int
    error: str | None


class Dials(TypedDict, total=False):
    """A line of `meet`. `counted`: token of a burst -> packets that arrived; `dropped`: by the socket, since it was asked last."""

    links: list[Dial]
    counted: dict[str, int]
    dropped: int


class CollectiveRank(TypedDict, total=False):
    """What a rank of the collective smoke test wrote down, and (`collective-look`) the stacks of its threads."""

    pid: int
    stage: str
    error: str
    results: list[Json]
    stack: list[str]


class CollectiveEnded(TypedDict):
    """How torchrun ended on a node. `left`: processes that do not end; `log`: last lines of torchrun, `errors`: of its ranks."""

    returncode: int | None
    left: list[int]
    log: list[str]
    errors: list[str]


class CollectiveLine(TypedDict):
    """A line of `collective`."""

    phase: str
    ranks: dict[str, CollectiveRank]
    ended: CollectiveEnded | None


class CollectiveLook(TypedDict):
    """The answer of `collective-look`."""

    phase: str
    ranks: dict[str, CollectiveRank]
    log: list[str]
