"""What the owner of a run must know when no supervisor looks after it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from homelab.controller.attempt import watchdog
from homelab.controller.attempt.watchdog import AttemptVerdict, NodeStatus
from homelab.controller.base.hint import Command, Hint
from homelab.controller.base.sanitize import plain
from homelab.controller.run.state import State
from homelab.shared.protocol.rank_messages import RankStatus
from homelab.shared.protocol.run_messages import Reply, RunReply


def outliving(replies: Mapping[str, Reply], attempt: int, stop: Command) -> tuple[Hint, ...]:
    """A line where processes of a run are alive on nodes on which its newest attempt has ended. `stop`: the command that ends them."""
    alive = {
        name: run.processes - run.agent_alive
        for name, reply in replies.items()
        if (run := reply.run) and run.attempt == attempt and run.exit is not None and run.processes > run.agent_alive
    }
    if not alive:
        return ()
    where = ", ".join(f"{name} ({count})" for name, count in alive.items())
    seen = f"processes of this run are running on {where}, although its attempt {attempt} has ended: somebody started its commands by hand"
    return (Hint("{}; {} ends them", seen, stop),)


def unsupervised_warnings(
    state: State,
    record: Mapping[str, Any],
    silent_place: str,
    still: AttemptVerdict | None,
    *,
    recover: Command,
    supervise: Command,
    is_pending: bool = False,
) -> tuple[Hint, ...]:
    """A line each, with the command that helps at its end; none for a run that needs nobody. Not to be asked where a supervisor is at work.

    `record`: supervisor.json, as the last one here has left it (a person may have spoilt it). `silent_place`: why nothing is heard of
    the one on a node, empty where it was not put on one. `still`: the verdict on ranks that stand still. `is_pending`: the command
    lives that is to leave a supervisor. `recover`, `supervise`: commands.
    """
    if state in ("done", "stopped", "planned", "shipping"):
        return ()
    lines = []
    if record.get("doing") == "given up" and state == "failed":
        lines.append(Hint("its supervisor has given up: {}; by hand: {}", plain(str(record.get("why", ""))), recover))
    elif silent_place:
        lines.append(Hint("no supervisor answers ({}): after a failure, recover this run by {}", silent_place, recover))
    elif record.get("doing") in ("watching", "recovering"):
        lines.append(
            Hint("this run has no supervisor any more: process {} here is gone; to start another: {}", record.get("pid"), supervise)
        )
    elif record.get("wanted") is True and record.get("doing") in ("launching", "recovering by hand") and not is_pending:
        lines.append(
            Hint("this run has no supervisor: the command that launched it ended before it started one; to start one: {}", supervise)
        )
    if still is not None and state in ("starting", "running"):
        lines.append(Hint("{}, and no supervisor is working: {}", still.because, recover))
    return tuple(lines)


def detect_stall(
    attempt: int, expected: Collection[str], replies: Mapping[str, Reply], step_s: float | None, planned_s: float | None = None
) -> watchdog.AttemptVerdict | None:
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
