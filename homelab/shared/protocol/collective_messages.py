"""The messages of the node program about the collective smoke test, and about other short jobs of torchrun."""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import Above, Below, Longest
from homelab.shared.protocol.marks import MOST_RANKS, Count, Duration, Json, Pids, Rank, Words
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request, UsableName, Variables

Log = Annotated[tuple[Annotated[str, Longest(100_000)], ...], Longest(10_000)]
Name = Annotated[str, Longest(100)]


class JobRequest(Request):
    """`collective-look` and `collective-end`: a short job of torchrun, by its name."""

    name: UsableName


class CollectiveRequest(JobRequest):
    """`collective`. `ranks`: how many are here; `input`: what they find in input.json."""

    command: Annotated[tuple[str, ...], Longest(10_000)]
    environment: Variables
    ranks: Count
    head_port: Count
    limit_s: Duration = 300.0
    input: Optional[Json] = None


class KeepRequest(Request):
    """`collective-keep`: a test that passed, as `homelab.controller.facts.node.CollectiveFacts` reads it."""

    record: Json


class CollectiveRank(Message):
    """What a rank wrote down, and (`collective-look`) the stacks of its threads. `results` are checked where they are read."""

    stage: Name = "starting"
    error: Words | None = None
    results: Annotated[tuple[Json, ...], Longest(10_000)] | None = None
    stack: Log = ()


Ranks = Annotated[dict[Rank, CollectiveRank], Longest(MOST_RANKS)]


class CollectiveEnded(Message):
    """How torchrun ended on a node. `left`: processes that do not end; `log`: last lines of torchrun, `errors`: of its ranks."""

    returncode: Annotated[int, Above(-(2**31)), Below(2**31)] | None = None
    left: Pids = ()
    log: Log = ()
    errors: Log = ()


class CollectiveLine(Message):
    """A line of `collective`."""

    phase: Name
    ranks: Ranks
    ended: CollectiveEnded | None = None


class CollectiveLook(Message):
    """The answer of `collective-look`."""

    phase: Name
    ranks: Ranks
    log: Log
