"""The claim on a run: who starts or recovers it is alone, on all its nodes, and a stop by hand is seen (`homelab.node.run.claims`)."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from homelab.controller.base import elapsed
from homelab.controller.base.errors import StoppedError, SupersededError, TakenError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.remote.fanout import Fleet, on_all
from homelab.controller.run import process_owner, signals
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_requests import ClaimRequest, ReleaseRequest

_TIMEOUT_S = 20.0
_REFUSALS = (TakenError, StoppedError, SupersededError)
_given_up: set[str] = set()  # tokens of this process that a node may still hold for ours


class Claim:
    """On one run, by one command or one try of a supervisor. `after`: the newest attempt it knows; None before it was found out."""

    def __init__(
        self, fleet: Fleet, run: str, doing: str, age_s: Callable[[], float], after: int | None = None, *, is_launch: bool = False
    ) -> None:
        self.run = run
        self.token = secrets.token_hex(16)
        self.after = after
        self._fleet = fleet
        self._doing = doing
        self._age_s = age_s
        self._is_launch = is_launch
        self._tried: set[str] = set()
        self.newest: dict[str, int] = {}  # node that has given it -> the newest attempt it knew then

    def take(self, names: Collection[str], *, strictly: bool) -> None:
        """Have it on these nodes, too. The first one decides: of two that claim the same nodes one has them all.

        Raises TakenError, StoppedError or SupersededError; `strictly`, the error of a node that cannot be asked or cannot write, too.
        """
        ordered = sorted(set(names) - set(self.newest))
        for group in (ordered[:1], ordered[1:]):
            _, errors = on_all(group, self._take)
            refused = [error for error in errors.values() if strictly or isinstance(error, _REFUSALS)]
            if refused:
                raise next((error for error in refused if isinstance(error, _REFUSALS)), refused[0])

    def release(self) -> None:
        """Release the claim on all nodes; on a node that does not answer the claim expires."""
        names, self._tried = self._tried, set()
        self.newest.clear()
        with signals.held():
            released, _ = self._fleet.ask("release", ReleaseRequest(run=self.run, token=self.token), names=names)
            if names - set(released):
                _given_up.add(self.token)

    def as_request(self) -> dict[str, Any]:
        """What a stop and a start in its name say."""
        return {"token": self.token, "after": self.known()}

    def known(self, *numbers: int) -> int:
        """The newest attempt that anybody knew when the claim was taken: a newer one is somebody else's, and this claim is lost then."""
        return max([self.after or 0, *self.newest.values(), *numbers])

    def _take(self, name: str) -> None:
        agent = self._fleet.agent(name)  # to connect may take long: how long this has been under way is asked behind it
        self._tried.add(name)
        instead = None
        for _ in range(2):
            request = ClaimRequest(
                run=self.run, token=self.token, by=process_owner.name(), doing=self._doing, process=process_owner.mark(), after=self.after,
                age_s=self._age_s(), alone=self._is_launch, instead=instead,
            )  # fmt: skip
            answer = agent.ask("claim", request, timeout_s=_TIMEOUT_S)
            holder = answer["holder"]
            if holder is None:
                self.newest[name] = int(answer.get("newest", 0))
                return
            # Its process was killed on this machine; or it is an earlier try of this one, which the node did not hear give it up.
            if holder["is_started"] or not (holder["token"] in _given_up or process_owner.is_dead(holder["process"])):
                break
            instead = holder["token"]
        raise taken(name, self.run, holder)


@dataclass(frozen=True)
class ClaimedRun:
    """A run whose claim we have on the nodes of `fleet`, which is the whole cluster. `say` tells the person what is being done."""

    fleet: Fleet
    claim: Claim
    paths: RunPaths
    say: Say


def taken(node: str, run: str, holder: dict[str, Any]) -> TakenError:
    """The error of who comes second. `holder`: as the node tells of it."""
    other, by = holder["run"], holder["by"] or "somebody"
    where = f"node {node}; by {by}, {holder['age_s']:.0f} s ago"
    if holder["is_started"]:
        return TakenError(
            f"another run was started on {node} while this launch checked it: {other}", where=where,
            hint=Hint("{}; or both at once, if there is room: run the same launch again", homelab("status", other)),
        )  # fmt: skip
    problem = (
        f"this run is being {holder['doing']} already" if other == run else f"another run is being {holder['doing']} on {node} now: {other}"
    )
    return TakenError(
        problem,
        where=where,
        hint=Hint("{}; if that command is gone: {}, then run the command again", homelab("status", other), homelab("stop", other)),
    )


@contextmanager
def claimed(
    fleet: Fleet, run: str, names: Collection[str], doing: str, *, age_s: Callable[[], float] = process_owner.age_s, after: int | None = None,
    is_launch: bool = False,
) -> Iterator[Claim]:  # fmt: skip
    """The claim on a run inside the block, on those of `names` that answer (of a launch: on all). Raises what `Claim.take` does."""
    claim = Claim(fleet, run, doing, age_s, after, is_launch=is_launch)
    try:
        answering = names if is_launch else on_all(names, fleet.agent)[0]  # all are connected at once, also to who does not answer
        claim.take(answering, strictly=is_launch)
        yield claim
    finally:
        claim.release()


def since(began_at: float) -> Callable[[], float]:
    """How long ago a moment of `elapsed` was: a stop by hand while this machine slept is younger."""
    return lambda: elapsed.now_s() - began_at
