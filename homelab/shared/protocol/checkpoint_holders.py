"""Which checkpoint a training can go on from, and what has to be copied where, from who holds what. Pure; controller and worker use this rule.

    replicated   every node saves all of the state: a checkpoint has one part, and one holder is enough
    sharded      every rank saves its part (a shard), and perhaps that of a buddy: each part needs a holder

A shard that nobody holds cannot be computed from the others, so a node with the only copy of one cannot be left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

REPLICATED, SHARDED = "replicated", "sharded"

Holder = TypeVar("Holder")  # a node for the controller, a rank for the worker


@dataclass(frozen=True)
class Holding:
    """What one holder has whole of a checkpoint: these of its `of` parts, counted from 0."""

    parts: frozenset[int]
    of: int


WHOLE = Holding(frozenset({0}), 1)


@dataclass(frozen=True)
class CheckpointChoice(Generic[Holder]):
    """`step` with all parts of it, in the order of its holders; step 0 where there is none.

    `incomplete`: newer step -> its parts that nobody holds.
    """

    step: int
    held: Mapping[Holder, Holding]
    incomplete: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class Copy(Generic[Holder]):
    """One part of a checkpoint, from a holder to one that lacks it."""

    part: int
    source: Holder
    target: Holder


def layout_of(plan: Mapping[str, Any]) -> str:
    """The layout of the checkpoints of a plan; replicated where it does not say."""
    return str(plan.get("checkpoint_layout", REPLICATED))


def holding(layout: str, shards: Mapping[str, Any] | None) -> Holding | None:
    """What the folder of a whole checkpoint is worth. `shards`: {"of", "held"} of its manifest, None where it names none.

    A folder that names its shards is never taken for all of a checkpoint, whatever the plan says; where the plan is sharded, one that
    names none holds nothing that can be trusted.
    """
    if shards is not None:
        return Holding(frozenset(shards["held"]), int(shards["of"]))
    return WHOLE if layout == REPLICATED else None


def choose(held: Mapping[int, Mapping[Holder, Holding]]) -> CheckpointChoice[Holder]:
    """The newest checkpoint of which every part has a holder. `held`: step -> holder -> what it has of it."""
    incomplete: dict[int, tuple[int, ...]] = {}
    for step in sorted(held, reverse=True):
        divisions = {its.of for its in held[step].values()}
        for of in sorted(divisions):  # parts of different divisions do not fit together
            alike = {holder: its for holder, its in held[step].items() if its.of == of}
            if not missing(alike):
                return CheckpointChoice(step, alike, incomplete)
        if divisions:
            most = max(divisions)
            incomplete[step] = missing({holder: its for holder, its in held[step].items() if its.of == most})
    return CheckpointChoice(0, {}, incomplete)


def missing(held: Mapping[Holder, Holding]) -> tuple[int, ...]:
    """The parts of a checkpoint that none of these has. All are of the same division."""
    of = max((its.of for its in held.values()), default=1)
    return tuple(sorted(set(range(of)).difference(*(its.parts for its in held.values()))))


def copies(held: Mapping[Holder, Holding], team: Sequence[Holder], *, to_all: bool) -> tuple[Copy[Holder], ...]:
    """What has to be copied before `team` goes on: each part that none of it holds goes to one of it; `to_all`: to all that lack it.

    The source is the first holder; of the team, the one with the fewest parts takes a part, and the first of several such.
    Every part needs a holder (see `choose`).
    """
    made: list[Copy[Holder]] = []
    parts = {member: set(held[member].parts) if member in held else set() for member in team}
    for part in range(max((its.of for its in held.values()), default=0)):
        lacking = [member for member in team if part not in parts[member]]
        if not to_all:
            lacking = sorted(lacking, key=lambda member: len(parts[member]))[:1] if len(lacking) == len(team) else []
        source = next(holder for holder, its in held.items() if part in its.parts)
        for member in lacking:
            parts[member].add(part)
            made.append(Copy(part, source, member))
    return tuple(made)


def indispensable(held: Mapping[Holder, Holding], among: Collection[Holder]) -> dict[Holder, tuple[int, ...]]:
    """Holders that have the only copy of a part among these -> those parts. Of a replicated checkpoint none is: the copy is brought first."""
    here = {holder: its.parts for holder, its in held.items() if holder in among and its.of > 1}
    own = {
        holder: tuple(sorted(parts.difference(*(others for other, others in here.items() if other != holder))))
        for holder, parts in here.items()
    }
    return {holder: parts for holder, parts in own.items() if parts}
