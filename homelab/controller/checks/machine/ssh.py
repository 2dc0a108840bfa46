"""ssh: the node let us in, and the agent answered there."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base import own_machine
from homelab.controller.base.errors import GREETING_LIMIT_S, SilentError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import on_node

LATE_GREETING_S = 4.0
SLOW_ANSWER_S = 15.0  # an answer takes 0.2 s; with torch's import for the matmul on a cold GPU up to ten


@check(
    "ssh.login",
    "the login works, the host key is the known one, and the agent answers",
    worst="fail",
    sees="login",
    always=True,
    is_certain=True,
)
def login(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail with the error's own words and hint for a node without facts; first of all, where no node can be reached, for this machine."""
    names = [node.name for node in evidence.cluster.nodes]
    if len(names) > 1 and all(isinstance(evidence.unreachable.get(name), SilentError) for name in names):
        message = "no node can be reached: perhaps this machine is off the network, and not the nodes"
        yield "", Problem("fail", message, f"is its own cable plugged in, and is its Wi-Fi or VPN on? {own_machine.own_network()}")
    for node in evidence.cluster.nodes:
        if node.name in evidence.facts:
            continue
        error = evidence.unreachable.get(node.name)
        if error is not None:
            yield node.name, Problem("fail", error.message, error.hint or on_node(node, "true"))
        else:
            yield node.name, Problem("fail", "this node did not answer", on_node(node, "true"))


@check("ssh.probes", "the node could read all its facts", worst="warn", sees="login")
def probes(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for probes of the agent that broke: what they look at was not judged."""
    if facts.broken:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(facts.broken.items()))
        message = f"some facts could not be read, so {listed(sorted(facts.broken))} was not judged ({reasons})"
        yield Problem("warn", message, Hint("please report it with: {}", homelab("doctor", node.name)))


@check("ssh.slow", f"the node greets within {LATE_GREETING_S:.0f} s and answers within {SLOW_ANSWER_S:.0f}", worst="warn", sees="login")
def slow(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a node that took very long to answer, or whose SSH server nearly took too long to greet."""
    greeting_s = evidence.greetings_s.get(node.name, 0.0)
    if greeting_s > LATE_GREETING_S:
        message = (
            f"its SSH server answers late: it greeted after {greeting_s:.0f} s, and homelab gives up a login after {GREETING_LIMIT_S:.0f} s"
        )
        hint = f"is it busy, or does its SSH server wait for a name server (UseDNS in sshd_config)? {on_node(node, 'time true; uptime')}"
        yield Problem("warn", message, hint)
    seconds = evidence.answer_seconds.get(node.name)
    if seconds is not None and seconds > SLOW_ANSWER_S:
        hint = f"is it busy, or does its shell do much work at login? {on_node(node, 'time true; uptime')}"
        yield Problem("warn", f"it took {seconds:.0f} s to answer", hint)


@subject("ssh", "the login works, and the node answers", cluster_first=True)
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    missed = evidence.without_effect.get(node.name, ())
    note = f"; these keys of ssh_config have no effect here: {'; '.join(missed)}" if missed else ""
    return f"{facts.system.user}@{facts.system.hostname}, {facts.system.os}{note}"
