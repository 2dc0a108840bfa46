"""When the nodes that their owners want are let go, and taken back: after a save that is asked for. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from homelab.controller.features.supervise.observation import Observation
from homelab.controller.run import leave

# Who waits at the machine waits no longer: then the checkpoint that there is has to do. A step and a save are over by then on most machines.
SAVE_S = 120.0
LOOK_S = 1.0  # between two looks at whether somebody has come back


@dataclass(frozen=True)
class Saving:
    """A save was asked for: since when (monotonic), and the newest step that a rank had done then."""

    since_s: float
    step: int


@dataclass(frozen=True)
class Moves:
    """Who goes to its owner, with the words for it, and who comes from there, well."""

    leaving: Mapping[str, str]
    returning: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.leaving or self.returning)


def moves(observation: Observation, absent: Collection[str], well: Collection[str]) -> Moves:
    """`absent`: nodes that are not in the attempt; `well`: those of them that could take part."""
    leaving = {name: leave.sentence(name, away) for name, away in observation.away.items() if name not in absent}
    back = sorted(name for name in well if name in observation.lent and name not in observation.away)
    return Moves(leaving, tuple(back))


def next_move(observation: Observation, saving: Saving | None) -> Literal["save", "wait", "move"]:
    """What comes first, when there are moves: a save is asked for once, it is waited for, then the attempt ends."""
    verdict = observation.verdict
    if observation.save == "unknown" or (verdict is not None and verdict.blind):  # a node that cannot be heard could not be stopped
        return "wait"
    if observation.save == "none":
        return "move"
    if saving is None:
        return "save"
    is_saved = observation.checkpoint >= saving.step
    return "move" if is_saved or observation.now_s - saving.since_s > SAVE_S else "wait"


def why_waits(away: Mapping[str, leave.Away], nodes: Collection[str], indispensable: Mapping[str, tuple[int, ...]]) -> str:
    """Why nobody can go on without the nodes that are `away`; empty where the others can. `nodes`: that answer."""
    said = "; ".join(leave.sentence(name, away[name]) for name in sorted(away))
    if not set(nodes) - set(away):
        return f"{said}, and no other node is left" if away else ""
    needed = [name for name in sorted(away) if name in indispensable]
    shards = "; ".join(
        f"{name} is the only node with shard {', '.join(map(str, indispensable[name]))} of the checkpoint" for name in needed
    )
    return f"{said}; {shards}" if needed else ""
