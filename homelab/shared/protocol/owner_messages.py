"""What the node program says of who acts on a run: its supervisor, or the command that has claimed it."""

from __future__ import annotations

from typing import TypedDict

from homelab.shared.protocol.machine_messages import Json


class Follower(TypedDict):
    """A supervisor that follows a run over the network: who it is, when its last word came, and whether it has closed the connection."""

    by: str
    process: Json
    silent_s: float
    has_left: bool


class Claimant(TypedDict):
    """Who has claimed a run, to start it or to go on with it."""

    by: str
    doing: str
    age_s: float
    process: Json


class Owner(TypedDict):
    """Who acts on a run, as a node sees it. `stopped_attempt`: the newest attempt when it was stopped by hand last, None where it was not."""

    supervisor: Follower | None
    claim: Claimant | None
    stopped_attempt: int | None


class Holder(TypedDict):
    """Who has a run, or has started another one. `process` is a mark of `homelab.controller.run.process_owner`."""

    run: str
    token: str
    by: str
    doing: str
    age_s: float
    process: Json
    is_started: bool


class Claimed(TypedDict, total=False):
    """The answer of `claim`."""

    holder: Holder | None
    newest: int
