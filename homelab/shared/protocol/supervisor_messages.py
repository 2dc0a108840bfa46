"""The messages of the node program about placing, starting and ending a run's supervisor on a node."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Longest
from homelab.shared.protocol.marks import MOST_NODES, Count, Duration, NodeName, Path, Pids, Words
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request, RunRequest

Name = Annotated[str, Longest(100)]


class NeedsRequest(Request):
    """`supervisor-needs`: names of distributions."""

    packages: Annotated[tuple[Name, ...], Longest(1000)]


class PlaceRequest(RunRequest):
    """`supervisor-put`, with a tar, `supervisor-discard`, `supervisor-reach` and `supervisor-start`. `code`: the folder of its program."""

    code: Path


class EndRequest(RunRequest):
    """`supervisor-end`."""

    grace_s: Duration = 20.0


class SupervisorNeeds(Message):
    """The answer of `supervisor-needs`. `packages`: those that were asked for and are there, with their versions."""

    python: Path
    version: tuple[Count, Count, Count]
    packages: Annotated[dict[Name, Name], Longest(1000)]


class Barrier(Message):
    """Why a node cannot be reached from another one: an error's three parts. `is_login`: it answers, and no key opens it."""

    message: Words
    where: Words
    hint: Words
    is_login: bool


class SupervisorReach(Message):
    """The answer of `supervisor-reach`: by node, None where nothing is in the way."""

    errors: Annotated[dict[NodeName, Barrier | None], Longest(MOST_NODES)]


class SupervisorStarted(Message):
    """The answer of `supervisor-start`: the path of its log."""

    log: Path


class SupervisorEnded(Message):
    """The answer of `supervisor-end`. `left`: processes that do not end."""

    left: Pids
