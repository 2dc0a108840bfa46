"""Who acts on a run now, from what this machine and the nodes know: a supervisor here, on a node or elsewhere, or a command (`supervision.ownership`)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.sanitize import plain
from homelab.controller.facts.reading import read
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import process_owner, store, supervisor_lock
from homelab.controller.run.ownership import Ownership
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.owner_messages import Follower, Owner
from homelab.shared.protocol.request import RunRequest
from homelab.shared.protocol.run_messages import Reply, SupervisorLook, SupervisorReply

_ENDS = ("ended", "given up")
_LEAVES_S = 7.0  # a supervisor that has ended is counted for some seconds more (`homelab.node.run.ownership.LEFT_S`)


def of_run(
    paths: RunPaths,
    attempt: int,
    replies: Mapping[str, Reply],
    on_nodes: Mapping[str, SupervisorReply],
    *,
    was_held: bool = False,
    is_ours: bool = False,
) -> Ownership:
    """Who owns the newest `attempt`, by the newest `replies` of its nodes and what they say of a supervisor `on_nodes`.

    `was_held`: somebody here had the run before the nodes were asked. It has gone on since, and their answers may be older than its last word.
    `is_ours`: this process holds the run, and asks who else does.
    """
    owners = [reply.owner for reply in replies.values() if reply.owner]
    record = store.read_object(paths.supervisor_json)
    claims = [owner.claim for owner in owners if owner.claim and not process_owner.is_dead(owner.claim.process)]
    claim = next((claim for claim in claims if not is_ours or claim.process != process_owner.mark()), None)
    is_by_hand = store.intent_of(paths, attempt) in ("stopping", "stopped") or any(owner.stopped_attempt == attempt for owner in owners)
    place = remote_supervisor.recorded(paths)
    said = [reply.doing for reply in on_nodes.values()] if place else [record.get("doing")] if record.get("attempt") == attempt else []
    was_wanted = bool(place) or record.get("wanted") is not False
    return Ownership(
        ("" if is_ours else _here(paths)) or next((f"{reply} (on {name})" for name, reply in on_nodes.items() if reply.alive), "")
        or _elsewhere(owners) or (f"being {claim.doing} ({claim.by})" if claim else "") or ("it has just left" if was_held and not is_ours else ""),
        is_supervised=was_wanted,
        # A stop takes the claim of who was about to go on: one that is there now came after it.
        is_stopped_by_hand=is_by_hand and claim is None,
        has_said_its_end=not was_wanted or any(doing in _ENDS for doing in said),
    )  # fmt: skip


def _here(paths: RunPaths) -> str:
    """What the owner on this machine does; empty where there is none."""
    if not supervisor_lock.is_held(paths):
        return ""
    record = store.read_object(paths.supervisor_json)  # a person may have spoilt it
    doing = plain(str(record.get("doing") or "watching"))  # nothing is known where the folder was deleted
    return str(SupervisorReply(alive=True, doing=doing, why=plain(str(record.get("why", "")))))


def _elsewhere(owners: Iterable[Owner]) -> str:
    follower = _living(owners)
    return f"working elsewhere ({follower.by or 'another machine'})" if follower else ""


def _living(owners: Iterable[Owner]) -> Follower | None:
    """The supervisor that a node has heard lately. One whose process is gone, as this machine or a node knows that had it, does not count."""
    followers = [owner.supervisor for owner in owners if owner.supervisor]
    dead = [one.process for one in followers if one.is_dead]
    heard = [one for one in followers if one.process not in dead and not process_owner.is_dead(one.process)]
    return min(heard, key=lambda one: (one.has_left, one.silent_s), default=None)


def elsewhere(fleet: Fleet, paths: RunPaths, names: Collection[str] | None = None) -> Follower | None:
    """The supervisor of this run on a machine that is neither this one nor known to have it. One that has just left is waited for."""
    deadline = time.monotonic() + _LEAVES_S
    while True:
        answers, _ = fleet.ask("supervisor-look", RunRequest(run=paths.name), names=names)
        follower = _living(read(SupervisorLook, answer).owner for answer in answers.values())
        if follower is None or not follower.has_left or time.monotonic() > deadline:
            return follower
        time.sleep(0.5)
