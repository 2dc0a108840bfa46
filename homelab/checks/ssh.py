"""ssh: the node let us in, and the agent answered there."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import listed, on_node
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts

SLOW_ANSWER_S = 15.0  # an answer takes 0.2 s; with torch's import for the matmul on a cold GPU up to ten


def login(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail with the error's own words and hint for a node without facts."""
    for node in evidence.cluster.nodes:
        if node.name in evidence.facts:
            continue
        error = evidence.unreachable.get(node.name)
        if error is not None:
            yield node.name, Problem("fail", error.message, error.hint or on_node(node, "true"))
        else:
            yield node.name, Problem("fail", "nothing was heard from this node", on_node(node, "true"))


def probes(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for probes of the agent that broke: what they look at was not judged."""
    if facts.broken:
        said = "; ".join(f"{name}: {why}" for name, why in sorted(facts.broken.items()))
        message = f"not everything could be looked at, so {listed(sorted(facts.broken))} was not judged ({said})"
        yield Problem("warn", message, f"please report it with: homelab doctor {node.name}")


def slow(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a node that took very long to answer."""
    seconds = evidence.answer_seconds.get(node.name)
    if seconds is not None and seconds > SLOW_ANSWER_S:
        hint = f"is it busy, or does its shell do much on login? {on_node(node, 'time true; uptime')}"
        yield Problem("warn", f"it took {seconds:.0f} s to answer", hint)


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    return f"{facts.user}@{facts.hostname}, {facts.system}"


LOGIN = Check("ssh.login", "the node lets us in, its host key is the known one, and the agent answers", "fail", "login", of_cluster=login)
SUBJECT = Subject(
    "ssh",
    "the node lets us in, and answers",
    (
        LOGIN,
        Check("ssh.probes", "everything on the node could be looked at", "warn", "login", of_node=probes),
        Check("ssh.slow", f"the node answers within {SLOW_ANSWER_S:.0f} s", "warn", "login", of_node=slow),
    ),
    _summary,
)
