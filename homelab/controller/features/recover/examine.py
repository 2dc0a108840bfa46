"""What happened to an attempt: asked of the nodes before anything is stopped or started again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.attempt import diagnosis_store, preconditions
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.diagnose import endings
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.status import monitor
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.run_requests import PollRequest


@dataclass(frozen=True)
class Examination:
    """`because`: the run's state, or what the supervisor saw. `unreachable`: node -> why it could not be asked. `step`: the newest that was seen."""

    attempt: int
    because: str
    diagnosis: Diagnosis | None
    unreachable: dict[str, str]
    step: int = 0
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # node -> last lines of all its logs


@dataclass(frozen=True)
class AttemptEnd:
    """What a supervisor knows of an attempt that it ends.

    `silent`: node -> why it is not asked; `silent_ranks`: gave no sign before anything was stopped; `has_failed` is False where the attempt
    is ended to take a node back.
    """

    because: str
    has_failed: bool
    silent: Mapping[str, str]
    silent_ranks: Collection[int] = ()


def examine(fleet: Fleet, paths: RunPaths, say: Say) -> Examination:
    """Ask all nodes what happened. Raises InputError when there is nothing to recover: the run is going on, or is done."""
    say(f"reading what happened to {paths.name}")
    watcher = monitor.Watcher(fleet, paths, is_owner=True)
    snapshot = watcher.look()
    if snapshot.state == "done":
        raise InputError(
            "this run is done: there is nothing to recover", where=paths.name, hint=homelab(f"chat {paths.name} --prompt '...'")
        )
    if snapshot.state in ("running", "starting", "shipping"):
        if not watcher.unreachable:
            raise InputError(
                f"this run is {snapshot.state}: there is nothing to recover",
                where=f"{paths.name}, step {snapshot.step}",
                hint=Hint("{}; or first: {}", homelab("status", paths.name), homelab("stop", paths.name)),
            )
        preconditions.refuse_moving(fleet, paths.name, watcher.replies, watcher.unreachable, say, run_folder.plan_of(paths).step_s)
    has_failed = snapshot.state not in ("stopping", "stopped", "planned")
    diagnosis = snapshot.diagnosis or (watcher.diagnosis() if has_failed else None)
    if diagnosis is not None and has_failed:
        diagnosis_store.keep(paths, snapshot.attempt, diagnosis, watcher.unreachable)
    # Those that cannot be asked have the names of the plan. A machine that has one of them today, and answers, is another one.
    today = {reply.node for reply in watcher.replies.values()}
    unreachable = {name: why for name, why in watcher.unreachable.items() if name not in today}
    return Examination(snapshot.attempt, snapshot.state, diagnosis, unreachable)


def examine_failure(
    fleet: Fleet, paths: RunPaths, plan: Plan, end: AttemptEnd, request: PollRequest, keep: Callable[[dict[str, dict[str, Any]]], None]
) -> Examination:
    """What happened in an attempt that is to be ended: asks the nodes of its plan that are not silent. `keep` gets their answers in a thread of its own."""
    planned, in_cluster = {node.name for node in plan.nodes}, {node.name for node in fleet.cluster.nodes}
    names = [node.name for node in plan.nodes if node.name not in end.silent and node.name in in_cluster]
    answers, errors = fleet.ask("poll", request, names=names, timeout_s=15.0)
    # Beside the recovery: it takes a moment, and the next attempt need not wait for it.
    threading.Thread(target=keep, args=(answers,), name="keep metrics").start()
    replies = parse_replies(answers)
    unreachable = {**end.silent, **{name: error.message for name, error in errors.items()}}
    diagnosis = None
    if end.has_failed:
        of_plan = {name: why for name, why in unreachable.items() if name in planned}
        ways = {name: error.hint for name, error in errors.items() if error.hint}
        diagnosis = diagnosis_store.make(fleet.cluster, paths, replies, of_plan, silent_ranks=end.silent_ranks, ways=ways)
    if diagnosis is not None:
        if diagnosis.cause == endings.SILENT.id:  # the supervisor, which followed a silent rank, knows more of it
            diagnosis = diagnosis.model_copy(update={"because": (end.because, *diagnosis.because)})
        diagnosis_store.keep(paths, plan.attempt, diagnosis, unreachable)
    ranks = {name: list(reply.run.ranks.values()) if reply.run else [] for name, reply in replies.items()}
    step = max((rank.heartbeat.step for of_node in ranks.values() for rank in of_node if rank.heartbeat), default=plan.resume_step)
    logs = {name: [line for rank in of_node for line in (*rank.log_tail.stdout, *rank.log_tail.stderr)] for name, of_node in ranks.items()}
    return Examination(plan.attempt, end.because, diagnosis, unreachable, step, logs)
