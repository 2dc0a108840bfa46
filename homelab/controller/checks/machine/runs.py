"""runs: nothing else of ours trains here already. A run that is well is no fault: what it does is said, and nothing offers to end it."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import local_moment
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.run.state import FRESH_OTHER_S, FRESH_STEP_S
from homelab.shared.protocol.run_messages import RunAtWork, RunRecovered


@check("runs.alive", "no other run of homelab is running on the node, and no processes of one are left", worst="fail", sees="runs")
def alive(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """What each live run does: fail where it is left over, warn where it trains; on a node with cards a launch is refused then, too."""
    for run in facts.runs.alive:
        stale = why_stale(facts, run)
        if stale:
            yield Problem("fail", f"run {run} has left processes here: {stale}", fix=homelab("stop", run))
        else:
            yield Problem(
                "warn",
                f"run {run} {what_it_does(evidence, node, facts, run)}",
                Hint("start after it: {}", after(run)),
                is_busy=bool(node.gpus),
            )
    for run, supervisor in facts.runs.recovered.items():
        yield Problem("warn", recovered(run, supervisor), Hint("start after it: {}", after(run)))


def recovered(run: str, supervisor: RunRecovered) -> str:
    """That this run is between two attempts, and who looks after it."""
    return f"run {run} is being recovered here: its supervisor ({supervisor.by or 'of another machine'}) starts it again"


def why_stale(facts: Facts, run: str) -> str:
    """Why this run, of which a process was seen, will not go on by itself; "" for one that is well, or of which nothing is known."""
    if run not in facts.runs.alive and "runs" not in facts.broken:
        return "that run is not running here"
    at_work = facts.runs.at_work.get(run)
    if at_work is None:
        return ""
    if at_work.has_ended:
        return "its attempt has ended, but some of its processes are running"
    if not at_work.owner and at_work.still_s is not None and at_work.still_s > _limit_s(at_work):
        return f"no rank has made progress for {at_work.still_s / 60:.0f} min, and it has no supervisor"
    return ""


def _limit_s(at_work: RunAtWork) -> float:
    return FRESH_STEP_S + 12 * (at_work.step_s or 0.0) if at_work.phase == "training" and at_work.step_s else FRESH_OTHER_S


def what_it_does(evidence: Evidence, node: Node, facts: Facts, run: str) -> str:
    """'trains here, step 120 of 800, done at 03:10', in this machine's time."""
    at_work = facts.runs.at_work.get(run)
    if at_work is None or at_work.step is None:  # a program of one's own does not say how far it is
        return "is at work here"
    of = f" of {at_work.total_steps}" if at_work.total_steps else ""
    words = f"is training here, step {at_work.step}{of}"
    if facts.system.time is None or not at_work.total_steps or not at_work.step_s:
        return words
    now = facts.system.time - evidence.clock_offsets_s.get(node.name, 0.0)
    return f"{words}, done at {local_moment(now + max(0, at_work.total_steps - at_work.step) * at_work.step_s, now)}"


def after(run: str) -> Hint:
    """What waits for its end."""
    return Hint("{}, then the same command again", homelab("status --wait", run))


@subject("runs", "no other run is running", after="power")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    removed = f"; the token on it of {', '.join(facts.runs.secrets_removed)} was removed" if facts.runs.secrets_removed else ""
    return f"no run is running{removed}"
