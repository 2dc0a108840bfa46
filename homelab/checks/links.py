"""Between the nodes: who reaches whom, and how quickly a connection opens. What goes through it: `homelab.checks.wires`."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks import nat
from homelab.checks.blame import Pair, address_of, blame, others_of, some
from homelab.checks.check import Problem
from homelab.checks.commands import listed, on_node
from homelab.checks.evidence import NOT_DIALLED, Evidence, Link
from homelab.checks.firewall import opening
from homelab.planning.command import quote_words

SLOW_MS = 5.0  # on a wired LAN a connect takes 0.1 to 1 ms
UNSTEADY_MS = 50.0  # the worst of a few connects


def reach(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """Every failed dial is a fail, put on the node that explains most of them."""
    for node, pairs in blame(failed_pairs(evidence), evidence.head).items():
        yield node, _unreachable(evidence, node, pairs)


def failed_pairs(evidence: Evidence) -> set[Pair]:
    """The ordered pairs of which at least one dial failed."""
    return {(link.source, link.target) for link in evidence.links if link.error is not None}


def latency(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """A warning where even the quickest connect is slow, and where connects are unsteady on machines that have nothing else to do."""
    best = _milliseconds(evidence, "latency_ms")
    failed = failed_pairs(evidence)
    slow = {pair for pair, value_ms in best.items() if value_ms > SLOW_MS and pair not in failed}
    for node, pairs in blame(slow, evidence.head).items():
        worst = max(best[pair] for pair in pairs)
        others = others_of(node, pairs)
        yield (
            node,
            Problem(
                "warn",
                f"{worst:.0f} ms to {some(others)}: on a wired LAN it is below 1",
                _ping(evidence, node, others[0]),
            ),
        )
    yield from _unsteady(evidence, slow | failed)


def _unsteady(evidence: Evidence, known: set[Pair]) -> Iterator[tuple[str, Problem]]:
    median, worst = _milliseconds(evidence, "median_ms"), _milliseconds(evidence, "worst_ms")
    pairs = {
        pair for pair in median if pair not in known and (median[pair] > SLOW_MS or worst.get(pair, 0.0) > UNSTEADY_MS)
    }
    quiet = {pair for pair in pairs if not any(_busy(evidence, name) for name in pair)}
    for node, own in blame(quiet, evidence.head).items():
        if len(own) < 2:  # one connect that took long says nothing
            continue
        others = others_of(node, own)
        message = (
            f"connects to and from {some(others)} take {max(median[pair] for pair in own):.1f} ms in the middle and "
            f"{max(worst.get(pair, 0.0) for pair in own):.0f} ms at worst: the connection is unsteady"
        )
        yield node, Problem("warn", message, _ping(evidence, node, others[0]))


def _busy(evidence: Evidence, name: str) -> bool:
    """A machine that computes answers late, whatever its wire."""
    facts = evidence.facts.get(name)
    return facts is not None and facts.load_1min is not None and facts.load_1min >= facts.cpu_count


def _ping(evidence: Evidence, node: str, other: str) -> str:
    look = on_node(evidence.cluster.node(node), quote_words(["ping", "-c", "5", address_of(evidence, other)]))
    return f"is it on Wi-Fi, a VPN or a power-line adapter? {look}"


def best_ms(evidence: Evidence, node: str) -> float | None:
    """The quickest connect between this node and any other."""
    return min(
        (value_ms for pair, value_ms in _milliseconds(evidence, "latency_ms").items() if node in pair), default=None
    )


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
        return Problem("fail", f"its connections could not be tried: {error.removeprefix(NOT_DIALLED)}", _again(node))
    behind = nat.explanation(evidence, node)
    if not incoming:
        message = f"it cannot open connections to {some(outgoing)}: {error}"
        look = quote_words(["ip", "route", "get", address_of(evidence, outgoing[0])])
        route = on_node(evidence.cluster.node(node), look)
        return Problem("fail", message, f"{opening(evidence, node).hint}; its route: {route}")
    both = " in both directions" if outgoing and set(incoming) == set(outgoing) else ""
    message = f"no connection from {some(incoming)}{both} {_ports(bad, dials)}: {error}"
    if behind is not None:
        return Problem("fail", message, behind.hint)
    how = opening(evidence, node)
    return Problem("fail", message, how.hint, how.fix)


def _again(node: str) -> str:
    return f"is it under heavy load? Then again: {quote_words(['homelab', 'preflight', '--only', 'network'])}; all that it says: {quote_words(['homelab', 'doctor', node])}"


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
