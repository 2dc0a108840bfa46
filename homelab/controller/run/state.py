"""The state of a run, derived from the answers of its nodes. It is never stored as the truth: the truth is on the nodes. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from homelab.shared.protocol.run_messages import Reply, RunReply

State = Literal["planned", "shipping", "starting", "running", "stopping", "stopped", "done", "failed", "lost"]

# Nothing more will happen by itself in these.
FINISHED: frozenset[State] = frozenset({"stopped", "done", "failed"})

# How old a sign of life may be before it says nothing any more. Loading a model or saving a checkpoint has no steps.
FRESH_STEP_S = 120.0
FRESH_OTHER_S = 900.0

Part = Literal["absent", "prepared", "alive", "succeeded", "failed", "stopped", "vanished"]


def newest_attempt(replies: Mapping[str, Reply]) -> int:
    """The newest attempt that any node knows; 0 when none was started."""
    return max((reply.run.attempt for reply in replies.values() if reply.run), default=0)


def node_part(run: RunReply | None, attempt: int) -> Part:
    """How far one node is in this attempt.

    "vanished": it was started and its agent is gone without having written how it ended, as after a power cut. (Where homelab was about
    to stop it, it is "stopped": between the last signal and the record of the end there is a moment.)
    """
    if run is None or run.attempt < attempt:
        return "absent"
    if run.exit is not None:
        if run.exit.is_success:
            return "succeeded"
        return "stopped" if run.exit.stopped else "failed"
    if run.is_alive:
        return "alive"
    if run.started_at is None:
        return "prepared"
    return "vanished" if run.stop_marked_at is None else "stopped"


def is_fresh(reply: Reply) -> bool:
    """True when a rank of this node gave a sign of life lately, by the node's own clock.

    The age of one from the future is unknown, because the clock was set back. A rank that lives soon gives another one.
    """
    for rank in reply.run.ranks.values() if reply.run else ():
        if rank.heartbeat is None:
            continue
        step_s = statistics.median([metric.step_s for metric in rank.metrics if metric.step_s] or [0.0])
        limit_s = FRESH_STEP_S + 12 * step_s if rank.heartbeat.phase == "training" else FRESH_OTHER_S
        if abs(reply.time - rank.heartbeat.time) <= limit_s:
            return True
    return False


def has_trained(run: RunReply) -> bool:
    """True when a rank of this node is in its steps, or past them."""
    for rank in run.ranks.values():
        if any(metric.kind == "train" for metric in rank.metrics):
            return True
        beat = rank.heartbeat
        if beat is not None and (beat.phase in ("training", "saving", "evaluating", "done") or beat.step > 0):
            return True
    return False


def has_printed(run: RunReply) -> bool:
    """True when a rank of this node has said anything: all that is known of a [script] from outside."""
    return any(rank.log_tail.stdout or rank.log_tail.stderr for rank in run.ranks.values())


def run_state(
    expected_nodes: Iterable[str],
    replies: Mapping[str, Reply],
    unreachable: Mapping[str, str],
    *,
    intent: State | None = None,
    kept: State | None = None,
    is_script: bool = False,
) -> State:
    """The state of the newest attempt. A [script] gives no signs of its steps: it runs once it has printed something.

    `expected_nodes` are those of the plan (empty: all that know the run). `intent` is what the controller last wrote,
    where there is one: only it knows that code is being shipped or that a stop is under way. "failed" was asked and has
    failed; "lost" could not be asked. `kept` is the state of this attempt as it was seen last: one that had ended stays so when its
    nodes are switched off.
    """
    expected = list(expected_nodes) or [node for node, reply in replies.items() if reply.run] + list(unreachable)
    attempt = newest_attempt(replies)
    is_running = (lambda run: has_trained(run) or has_printed(run)) if is_script else has_trained
    answered = {node: replies[node] for node in expected if node in replies}
    missing = [node for node in expected if node not in replies]
    if not answered and missing:
        return kept if kept in FINISHED else "lost"
    parts = {node: node_part(reply.run, attempt) for node, reply in answered.items()}
    present = set(parts.values())
    is_alive = "alive" in present
    is_stop = intent in ("stopping", "stopped") or "stopped" in present

    if present & {"failed", "vanished"} and not _stop_came_first(answered, parts, intent):
        return "failed"
    if is_stop and not present <= {"absent", "prepared", "succeeded"}:
        return "stopping" if is_alive else "stopped"
    started = [reply.run for reply in answered.values() if reply.run and reply.run.attempt == attempt]
    if "succeeded" in present and not is_alive:
        is_complete = any(run.final for run in started) or (present == {"succeeded"} and not missing)
        if is_complete:
            return "done"
    if missing:
        fresh = [run for reply in answered.values() if is_fresh(reply) and (run := reply.run) and run.is_alive]
        if not fresh:
            return kept if kept in FINISHED and not is_alive else "lost"
        return "running" if any(is_running(run) for run in fresh) else "starting"
    if is_alive:
        return "running" if any(is_running(run) for run in started) else "starting"
    if intent in ("stopping", "stopped"):
        return "stopped"
    if "succeeded" in present:
        return "failed"  # some ended well, the others never took part: no node holds the result
    if "prepared" in present or intent == "shipping":
        return "shipping"
    return "planned"


def _stop_came_first(answered: Mapping[str, Reply], parts: Mapping[str, Part], intent: State | None) -> bool:
    """True when the failures are only the echo of a stop: ranks whose peers were stopped fail, too."""
    if intent in ("stopping", "stopped"):
        return True
    if "vanished" in parts.values():
        return False

    def first(part: Part) -> float:
        ends = [run for node, own_part in parts.items() if own_part == part and (run := answered[node].run)]
        times = [run.exit.ended_at if run.exit else run.stop_marked_at for run in ends]
        return min((time for time in times if time), default=float("inf"))

    return first("stopped") < first("failed")
