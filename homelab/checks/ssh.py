"""ssh: the node let us in, and the agent answered there."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.commands import on_node
from homelab.checks.evidence import Evidence, Finding

ID = "ssh"


def judge(evidence: Evidence) -> Iterator[Finding]:
    """fail with the error's own words and hint for a node without facts; ok with user, host name and system otherwise."""
    for node in evidence.cluster.nodes:
        if node.name in evidence.facts:
            facts = evidence.facts[node.name]
            yield Finding(ID, node.name, "ok", f"{facts.user}@{facts.hostname}, {facts.system}")
        elif node.name in evidence.unreachable:
            error = evidence.unreachable[node.name]
            yield Finding(ID, node.name, "fail", error.message, error.hint or on_node(node, "true"))
        else:
            yield Finding(ID, node.name, "fail", "nothing was heard from this node", on_node(node, "true"))
