"""Does an attempt stand still? From one look at its nodes, for a run that no supervisor follows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from homelab.controller.attempt import watchdog
from homelab.controller.attempt.node_status import NodeStatus, RankStatus
from homelab.controller.remote.poll_reply import Reply, RunReply


def detect_stall(
    attempt: int, expected: Collection[str], replies: Mapping[str, Reply], step_s: float | None, planned_s: float | None = None
) -> watchdog.Verdict | None:
    """The watchdog's verdict where everybody waits, None where somebody moves or nobody can tell.

    `expected`: the nodes of the plan; `step_s`: how long a step takes, if known; `planned_s`: how long the plan expects it to take. How
    long a rank has stood still is counted by its node's own clock, which wrote both times.
    """
    parts = {
        name: (reply, reply.run) for name, reply in replies.items() if reply.run and reply.run.attempt == attempt and reply.run.is_alive
    }
    signs = {name: _sign(reply, run) for name, (reply, run) in parts.items()}
    verdict = watchdog.judge(attempt, expected, signs, step_s, planned_s)
    return verdict if verdict.kind in ("silent-node", "hang") else None


def _sign(reply: Reply, run: RunReply) -> NodeStatus:
    ranks = {
        number: RankStatus(phase=beat.phase, step=beat.step, still_s=max(0.0, reply.time - beat.time), state="S")
        for number, rank in run.ranks.items()
        if (beat := rank.heartbeat) is not None
    }
    return NodeStatus(attempt=run.attempt, newest=run.attempt, started=True, agent="S", torchrun="S", ranks=ranks)
