"""The messages of the node program about placing, starting and ending a run's supervisor on a node."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Longest
from homelab.shared.protocol.marks import MOST_NODES, Count, NodeName, Path, Pids, Words
from homelab.shared.protocol.message import Message

Name = Annotated[str, Longest(100)]


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
