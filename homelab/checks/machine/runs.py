"""runs: nothing else of ours trains here already."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.check import Problem, check, subject
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts.node import Facts
from homelab.text.hint import chain, homelab
from homelab.text.units import listed


@check("runs.alive", "no other run of ours is alive on the node (without cards: warn)", worst="fail", sees="runs")
def alive(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """A live run: fail where it holds GPUs (two runs do not fit), warn on a CPU node (both only become slower)."""
    if facts.runs.alive:
        several = len(facts.runs.alive) > 1
        message = f"{'runs' if several else 'run'} {listed(facts.runs.alive)} {'are' if several else 'is'} alive here"
        hint = chain(*(homelab("stop", run) for run in facts.runs.alive))
        yield Problem("fail" if node.gpus else "warn", message, hint)


@subject("runs", "no other run is alive", after="power")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    removed = f"; the token that it had kept of {listed(facts.runs.secrets_removed)} was removed" if facts.runs.secrets_removed else ""
    return f"no run is alive{removed}"
