"""Who may end or stop an attempt, and when a run is over. Pure: no clock, no nodes.

One at a time owns a run: the supervisor that follows it, on this machine, on a node or anywhere else, or the command that starts it or goes on
with it. Between two attempts nothing runs on the nodes, and their words are those of a run that has ended: only its owner knows that it goes on.
Who looks (status, launch --wait, logs, track, ...) reads, and takes nothing for the end before the owner has left. A person's `homelab stop`
goes before everybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from homelab.controller.run.state import FINISHED, State

# A run that nobody is seen to own is over when it has been so for this long: a supervisor may just be on its way (it is started after the
# ranks, and its first word to the nodes takes a moment). Of a run that no node tells of, the way to them may be what is gone for a while.
STILL_S, UNSEEN_S = 10.0, 60.0

Actor = Literal["person", "owner", "starter", "looker"]
"""`homelab stop`; the supervisor or the recovery that holds the run; the command that has launched a run and waits for it; everybody else."""


@dataclass(frozen=True)
class Ownership:
    """Who acts on a run now.

    `doing`: what its owner does, in words; empty where no owner is seen. `is_supervised`: it has, or was to have, a supervisor.
    `is_stopped_by_hand`: a person has stopped its newest attempt. `has_said_its_end`: its last owner has written down that it leaves the run, or
    it was never to have one.
    """

    doing: str = ""
    is_supervised: bool = True
    is_stopped_by_hand: bool = False
    has_said_its_end: bool = False

    @property
    def is_owned(self) -> bool:
        """Somebody will go on with it, or is about to say how it ended."""
        return bool(self.doing)


def told_state(state: State, owner: Ownership, kept: str | None = None) -> State:
    """What is told of a run in this state. What its owner has stopped, no person has: it is about to start again.

    `kept`: the state as it was written down last; an owner that gives up stops what is left, and writes that the run has failed.
    """
    if state not in ("stopping", "stopped") or owner.is_stopped_by_hand:
        return state
    if owner.is_owned:
        return "starting"
    return "failed" if state == "stopped" and kept == "failed" else state


def is_over(state: State, owner: Ownership, still_s: float) -> bool:
    """Whether nothing more will happen by itself. `still_s`: for how long it has been seen so, without an owner."""
    if state == "done" or (state == "stopped" and owner.is_stopped_by_hand):
        return True
    if owner.is_owned or state not in (*FINISHED, "lost"):
        return False
    return still_s >= (UNSEEN_S if state == "lost" else 0.0 if owner.has_said_its_end else STILL_S)


def is_orphaned(state: State, owner: Ownership) -> bool:
    """Whether what is left of the run on the nodes belongs to nobody (`homelab stop --orphans`)."""
    return not owner.is_owned and state in (*FINISHED, "lost")


def may_end(actor: Actor, state: State, owner: Ownership) -> bool:
    """Whether this actor may end what of the run is on the nodes.

    A starter ends the rest of an attempt that has failed, where no supervisor does it: ranks that had not begun to train wait long for the one
    that is missing, and hold their cards meanwhile.
    """
    if actor in ("person", "owner"):
        return True
    return actor == "starter" and state == "failed" and not owner.is_owned and not owner.is_supervised
