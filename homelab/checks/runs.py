"""runs: nothing else of ours trains here already."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import listed
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning.command import quote_words


def alive(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """A live run: fail where it holds GPUs (two runs do not fit), warn on a CPU node (both only become slower)."""
    if facts.runs_alive:
        several = len(facts.runs_alive) > 1
        message = f"{'runs' if several else 'run'} {listed(facts.runs_alive)} {'are' if several else 'is'} alive here"
        hint = " && ".join(quote_words(["homelab", "stop", run]) for run in facts.runs_alive)
        yield Problem("fail" if node.gpus else "warn", message, hint)


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    removed = f"; the token that it had kept of {listed(facts.secrets_removed)} was removed" if facts.secrets_removed else ""
    return f"no run is alive{removed}"


SUBJECT = Subject(
    "runs",
    "no other run is alive",
    (Check("runs.alive", "no other run of ours is alive on the node (without cards: warn)", "fail", "runs", of_node=alive),),
    _summary,
)
