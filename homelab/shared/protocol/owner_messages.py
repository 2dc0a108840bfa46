"""What the node program says of who acts on a run: its supervisor, or the command that has claimed it."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import Longest
from homelab.shared.protocol.marks import OR_NONE, PLAIN, Attempt, Duration, Json, RunName, Seconds
from homelab.shared.protocol.message import Message

Name = Annotated[str, Longest(400), PLAIN]


class Follower(Message):
    """A supervisor that follows a run over the network: who it is, when its last word came, and whether it has closed the connection.

    `is_dead`: its process was on this node and is gone, which its other nodes cannot know. `process` is read by `homelab.controller.run.process_owner`.
    """

    by: Name = ""
    process: Json = {}
    silent_s: Duration
    has_left: bool = False
    is_dead: bool = False


class Claimant(Message):
    """Who has claimed a run, to start it or to go on with it. `process` as above."""

    by: Name = ""
    doing: Name = ""
    age_s: Duration
    process: Json = {}


class Owner(Message):
    """Who acts on a run, as a node sees it. `stopped_attempt`: the newest attempt when it was stopped by hand last, None where it was not."""

    supervisor: Annotated[Follower | None, OR_NONE] = None
    claim: Annotated[Claimant | None, OR_NONE] = None
    stopped_attempt: Annotated[int | None, OR_NONE] = None


class Holder(Message):
    """Who has a run, or has started another one. `process` as above."""

    run: RunName
    token: Annotated[str, Longest(200)]
    by: Annotated[str, Longest(400), PLAIN]
    doing: Annotated[str, Longest(100), PLAIN]
    age_s: Seconds
    process: Json
    is_started: bool


class Claimed(Message):
    """The answer of `claim`."""

    holder: Holder | None
    newest: Attempt = 0
