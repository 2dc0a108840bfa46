"""Between the nodes: who reaches whom, and how quickly a connection opens. What goes through it: `homelab.controller.checks.network.bandwidth`."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.base.units import listed
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import NOT_DIALLED, Evidence, Link
from homelab.controller.checks.network import nat, packet_loss
from homelab.controller.checks.network.blame import Pair, address_of, blame, others_of, some
from homelab.controller.checks.network.firewall import letting_out, opening, stops_out
from homelab.controller.facts.node_commands import on_node

SLOW_MS = 5.0  # on a wired LAN a connect takes 0.1 to 1 ms
UNSTEADY_MS = 50.0  # the worst of a few connects
# How `homelab.node.network.connectivity` says that nothing came, or that a connection was open already and nothing more came.
_GIVEN_UP = ("no answer within", "it connected, but no byte")


@check(
    "network.reach",
    "every node opens connections to every other one, on the rendezvous port and on ephemeral ports",
    worst="fail",
    sees="dials",
    after="network.nat",
)
def reach(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """Every failed dial is a fail, put on the node that explains most of them."""
    failed = {pair for pair in failed_pairs(evidence) if not _is_by_loss(evidence, pair)}
    held_back = _held_back(evidence, failed)
    blamed = blame(failed - held_back, evidence.head)
    for source, target in sorted(held_back):
        blamed.setdefault(source, []).append((source, target))
    for node, pairs in blamed.items():
        yield node, _unreachable(evidence, node, pairs)


def _held_back(evidence: Evidence, failed: set[Pair]) -> set[Pair]:
    """The pairs of which a firewall of the source is to blame: it can stop what leaves, and the target has none that is seen and is
    reached by everybody without one."""
    stopped = {pair for pair in failed if stops_out(evidence, pair[0])}

    def is_open(name: str) -> bool:
        facts = evidence.facts.get(name)
        not_tried = any(link.target == name and (link.error or "").startswith(NOT_DIALLED) for link in evidence.links)
        others = any(target == name for _, target in failed - stopped)
        return facts is not None and facts.network.firewall is None and not others and not not_tried

    return {pair for pair in stopped if is_open(pair[1])}


def _is_by_loss(evidence: Evidence, pair: Pair) -> bool:
    """Whether a few dials of a pair were given up because packets are lost there: that is a finding of its own, and no firewall."""
    dials = [link for link in evidence.links if (link.source, link.target) == pair]
    bad = [link.error for link in dials if link.error is not None]
    return packet_loss.is_lossy(evidence, pair) and 2 * len(bad) <= len(dials) and all(error.startswith(_GIVEN_UP) for error in bad)


def failed_pairs(evidence: Evidence) -> set[Pair]:
    """The ordered pairs of which at least one dial failed."""
    return {(link.source, link.target) for link in evidence.links if link.error is not None}


@check("network.latency", "connections between the nodes open quickly and steadily", worst="warn", sees="dials", after="network.throughput")
def latency(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """A warning where even the quickest connect is slow, and where connects are unsteady on machines that have nothing else to do."""
    best = _milliseconds(evidence, "latency_ms")
    failed = failed_pairs(evidence) | {
        (link.source, link.target) for link in evidence.links if packet_loss.is_lossy(evidence, (link.source, link.target))
    }
    slow = {pair for pair, value_ms in best.items() if value_ms > SLOW_MS and pair not in failed}
    for node, pairs in blame(slow, evidence.head).items():
        worst = max(best[pair] for pair in pairs)
        others = others_of(node, pairs)
        yield (node, Problem("warn", f"{worst:.0f} ms to {some(others)}: on a wired LAN it is below 1", _ping(evidence, node, others[0])))
    yield from _unsteady(evidence, slow | failed)


def _unsteady(evidence: Evidence, reported: set[Pair]) -> Iterator[tuple[str, Problem]]:
    median, worst = _milliseconds(evidence, "median_ms"), _milliseconds(evidence, "worst_ms")
    pairs = {pair for pair in median if pair not in reported and (median[pair] > SLOW_MS or worst.get(pair, 0.0) > UNSTEADY_MS)}
    quiet = {pair for pair in pairs if not any(_busy(evidence, name) for name in pair)}
    for node, own in blame(quiet, evidence.head).items():
        if len(own) < 2:  # one connect that took long says nothing
            continue
        others = others_of(node, own)
        message = (
            f"connects to and from {some(others)} take {max(median[pair] for pair in own):.1f} ms (median) and "
            f"{max(worst.get(pair, 0.0) for pair in own):.0f} ms at worst: the connection is unsteady"
        )
        yield node, Problem("warn", message, _ping(evidence, node, others[0]))


def _busy(evidence: Evidence, name: str) -> bool:
    """A machine that computes answers late, whatever its wire."""
    facts = evidence.facts.get(name)
    return facts is not None and facts.system.load_1min is not None and facts.system.load_1min >= facts.system.cpu_count


def _ping(evidence: Evidence, node: str, other: str) -> str:
    command = on_node(evidence.cluster.node(node), quote_words(["ping", "-c", "5", address_of(evidence, other)]))
    return f"is it on Wi-Fi, a VPN or a power-line adapter? {command}"


def best_ms(evidence: Evidence, node: str) -> float | None:
    """The quickest connect between this node and any other."""
    return min((value_ms for pair, value_ms in _milliseconds(evidence, "latency_ms").items() if node in pair), default=None)


def _milliseconds(evidence: Evidence, field: str) -> dict[Pair, float]:
    """A latency of each ordered pair: of its dials the one that went best, because one slow dial on a busy machine says nothing."""
    best: dict[Pair, float] = {}
    for link in evidence.links:
        value_ms = getattr(link, field)
        if link.error is None and value_ms is not None:
            pair = (link.source, link.target)
            best[pair] = min(value_ms, best.get(pair, value_ms))
    return best


def _unreachable(evidence: Evidence, node: str, pairs: list[Pair]) -> Problem:
    incoming = sorted({source for source, target in pairs if target == node})
    outgoing = sorted({target for source, target in pairs if source == node})
    dials = [link for link in evidence.links if (link.source, link.target) in pairs]
    bad = [link for link in dials if link.error is not None]
    error = bad[0].error or ""
    if error.startswith(NOT_DIALLED):
        return Problem("fail", f"its connections could not be tested: {error.removeprefix(NOT_DIALLED)}", _again(node))
    behind = nat.explanation(evidence, node)
    if not incoming:
        message = f"it cannot open connections to {some(outgoing)}: {error}"
        command = quote_words(["ip", "route", "get", address_of(evidence, outgoing[0])])
        route = on_node(evidence.cluster.node(node), command)
        firewall_fix = letting_out(evidence, node)
        return Problem("fail", message, Hint("{}; its route: {}", firewall_fix.hint, route), firewall_fix.fix)
    both = " in both directions" if outgoing and set(incoming) == set(outgoing) else ""
    message = f"no connection from {some(incoming)}{both} {_ports(bad, dials)}: {error}"
    if behind is not None:
        return Problem("fail", message, behind.hint)
    firewall_fix = opening(evidence, node)
    return Problem("fail", message, firewall_fix.hint, firewall_fix.fix)


def _again(node: str) -> str:
    return Hint("is it under heavy load? Test again: {}; all facts of it: {}", homelab("preflight --only network"), homelab("doctor", node))


def _ports(bad: list[Link], dials: list[Link]) -> str:
    """Which ports are meant: all, only the rendezvous port, or only the others (which NCCL and gloo choose themselves)."""
    numbers = sorted({link.port for link in bad})
    if len(bad) == len(dials):
        return "on any port tried"
    if all(link.is_rendezvous for link in bad):
        return f"on the rendezvous port {numbers[0]}"
    if not any(link.is_rendezvous for link in bad):
        return "on ephemeral ports (NCCL and gloo need them)"
    return f"on ports {listed(map(str, numbers))}"
