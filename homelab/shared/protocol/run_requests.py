"""The requests to the node program about a run: who has it, its start and its stop, and what is known of it."""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import Longest
from homelab.shared.protocol.house_messages import Programs, When
from homelab.shared.protocol.marks import MOST_RANKS, Attempt, Count, Duration, Json, Path
from homelab.shared.protocol.request import Request, RunRequest, UsableName, Variables

Token = Annotated[str, Longest(200)]
Name = Annotated[str, Longest(400)]


class ClaimRequest(RunRequest):
    """`claim`. `age_s`: since the claimer began, a stop by hand that is younger ends what it is about. `after`: the newest attempt that it knows, None
    where it is to find out. `alone`: a launch; no other run may be starting here, or have started since. `instead`: the token of a claim whose owner
    is dead. `process` is read by `homelab.controller.run.process_owner`.
    """

    token: Token
    by: Name
    doing: Name
    process: Json
    age_s: Duration
    after: Optional[Attempt] = None
    alone: bool = False
    instead: Optional[Token] = None


class ReleaseRequest(RunRequest):
    """`release`: the claim of `token`."""

    token: Token


class StartRequest(RunRequest):
    """`start`. `token`: of the claim on the run; None for nobody's. `program`: of a rank, where homelab may start it without
    torchrun: `direct` does it now, and so long after the first steps of this attempt the node prepares it
    for the next one (None: not at all).
    """

    attempt: Attempt
    run_json: Json
    plan_json: Json
    command: Annotated[tuple[str, ...], Longest(10_000)]
    environment: Variables
    secrets: Variables = {}
    token: Optional[Token] = None
    program: Annotated[tuple[str, ...], Longest(100)] = ()
    direct: bool = False
    standby_after_s: Optional[Duration] = None


class StopRequest(RunRequest):
    """`stop` and `mark-stop`. `by_hand`: the holder of the run's claim may not start it any more. With a `token` it is a recovery's own stop; `after`:
    the newest attempt that it knows. `made_in`: the workdir in which the run's folder was made here, where that may be another one than today's.
    """

    grace_s: Duration = 8.0
    by_hand: bool = False
    token: Optional[Token] = None
    after: Optional[Attempt] = None
    made_in: Optional[Path] = None


class UndoRequest(RunRequest):
    """`undo`: what the claim of `token` has begun."""

    token: Token
    grace_s: Duration = 8.0


class FollowRequest(RunRequest):
    """`follow`. `by` and `process`: who asks. `yield_to`, `yield_when`: what is a sign of the node's owner."""

    attempt: Attempt
    by: Name = ""
    process: Json = {}
    yield_to: Programs = ()
    yield_when: When = "never"


class SaveRequest(RunRequest):
    """`save`: a checkpoint of this attempt, after the step that is being done."""

    attempt: Attempt


class PollRequest(Request):
    """`poll`. `run` None: the machine alone. `attempt` None: the newest here. `after_lines`: rank -> metrics that are not sent again, where they are of
    `lines_of_attempt` (None: of any). `after_bytes`: rank -> where these end in its file, as the answer before has said. `before`: with the curves of
    what came before this attempt, as the head keeps them.
    """

    run: Optional[UsableName]
    attempt: Optional[Attempt] = None
    tail_lines: Count = 20
    torchrun_lines: Count = 60
    after_lines: Annotated[dict[str, Count], Longest(MOST_RANKS)] = {}
    after_bytes: Annotated[dict[str, Count], Longest(MOST_RANKS)] = {}
    lines_of_attempt: Optional[Attempt] = None
    before: bool = False
