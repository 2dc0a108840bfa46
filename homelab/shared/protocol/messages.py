"""The messages of the node program about runs that are read as JSON objects (those with limits beside their fields: `run_messages`)."""

from __future__ import annotations

from typing import Any, TypedDict

from homelab.shared.protocol.machine_messages import Json


class Described(TypedDict):
    """The answer of `describe`: run.json and the plans by number of attempt."""

    run_json: Json | None
    plans: dict[str, Json | None]


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


class SupervisorEnded(TypedDict):
    """The answer of `supervisor-end`. `left`: processes that do not end."""

    was_alive: bool
    left: list[int]
