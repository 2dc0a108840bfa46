"""Between the nodes: every dial of every node to every other one, and the fewest nodes that explain those that failed."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from homelab.checks.commands import listed, on_node
from homelab.checks.evidence import Evidence, Finding, Link
from homelab.planning.command import quote_words

ID = "network"
SLOW_MS = 5.0  # on a wired LAN a connect takes 0.1 to 1 ms
SLOW_BYTES_PER_S = 30e6  # a quarter of 1 Gbit/s; below it a pair is compared with the others
SLOW_AGAINST_BEST = 3.0
Pair = tuple[str, str]


def judge(evidence: Evidence) -> dict[str, list[Finding]]:
    """Findings by node. A failed dial is a fail, a slow pair a warning; each is put on the node that explains most of them."""
    failed = {(link.source, link.target) for link in evidence.links if link.error is not None}
    found: dict[str, list[Finding]] = {}
    for node, pairs in blame(failed, evidence.head).items():
        found.setdefault(node, []).append(_unreachable(evidence, node, pairs))
    slow = {pair for pair, latency_ms in _latencies(evidence).items() if latency_ms > SLOW_MS and pair not in failed}
    for node, pairs in blame(slow, evidence.head).items():
        worst = max(_latencies(evidence)[pair] for pair in pairs)
        others = sorted({other for pair in pairs for other in pair if other != node})
        message = f"{worst:.0f} ms to {listed(others)}: on a wired LAN it is below 1"
        hint = f"is it on Wi-Fi, a VPN or a power-line adapter? {on_node(evidence.cluster.node(node), f'ping -c 5 {_address(evidence, others[0])}')}"
        found.setdefault(node, []).append(Finding(ID, node, "warn", message, hint))
    for node, pairs in blame(_thin(evidence), evidence.head).items():
        found.setdefault(node, []).append(_slow_wire(evidence, node, pairs))
    return found


def _thin(evidence: Evidence) -> set[Pair]:
    """Pairs whose wire is slow and far slower than another one of this cluster: every step of the training waits for the slowest."""
    measured = evidence.throughputs
    best = max(measured.values(), default=0.0)
    return {pair for pair, rate in measured.items() if rate < SLOW_BYTES_PER_S and rate * SLOW_AGAINST_BEST < best}


def _slow_wire(evidence: Evidence, node: str, pairs: list[Pair]) -> Finding:
    slowest = min(pairs, key=lambda pair: (evidence.throughputs[pair], pair))
    others = sorted({other for pair in pairs for other in pair if other != node})
    best = max(evidence.throughputs.values())
    message = f"{evidence.throughputs[slowest] / 1e6:.2g} MB/s between it and {listed(others)}; the best pair has {best / 1e6:.3g} MB/s, and all wait for the slowest"
    interface = evidence.lan[node][1] if node in evidence.lan else ""
    look = on_node(evidence.cluster.node(node), quote_words(["cat", f"/sys/class/net/{interface}/speed"]))
    return Finding(ID, node, "warn", message, f"change its cable or its port of the switch, or is it on Wi-Fi? Its speed: {look}")


def blame(pairs: Iterable[Pair], head: str) -> dict[str, list[Pair]]:
    """The fewest nodes that explain all bad (source, target) pairs, with the pairs of each.

    Greedy: the node in most pairs first; among equals the one that more often was the target (a firewall refuses what comes
    in), then one that is not the head. So a node that is cut off does not take the others' blame.
    """
    left = sorted(set(pairs))
    blamed: dict[str, list[Pair]] = {}
    while left:
        names = sorted({name for pair in left for name in pair})
        worst = max(
            names,
            key=lambda name: (sum(name in pair for pair in left), sum(name == pair[1] for pair in left), name != head),
        )
        blamed[worst] = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
    return blamed


def best_ms(evidence: Evidence, node: str) -> float | None:
    """The quickest connect between this node and any other."""
    return min((latency_ms for pair, latency_ms in _latencies(evidence).items() if node in pair), default=None)


def _latencies(evidence: Evidence) -> dict[Pair, float]:
    """The quickest dial of each ordered pair: one slow dial on a busy machine says nothing."""
    best: dict[Pair, float] = {}
    for link in evidence.links:
        if link.error is None and link.latency_ms is not None:
            pair = (link.source, link.target)
            best[pair] = min(link.latency_ms, best.get(pair, link.latency_ms))
    return best


def _unreachable(evidence: Evidence, node: str, pairs: list[Pair]) -> Finding:
    incoming = sorted({source for source, target in pairs if target == node})
    outgoing = sorted({target for source, target in pairs if source == node})
    dials = [link for link in evidence.links if (link.source, link.target) in pairs]
    bad = [link for link in dials if link.error is not None]
    error = bad[0].error
    if not incoming:
        message = f"it cannot open connections to {listed(outgoing)}: {error}"
        route = on_node(evidence.cluster.node(node), f"ip route get {_address(evidence, outgoing[0])}")
        return Finding(ID, node, "fail", message, f"{_open_firewall(evidence, node)}; its route: {route}")
    both = " in both directions" if outgoing and set(incoming) == set(outgoing) else ""
    message = f"no connection from {listed(incoming)}{both} {_ports(bad, dials)}: {error}"
    return Finding(ID, node, "fail", message, _open_firewall(evidence, node))


def _ports(bad: list[Link], dials: list[Link]) -> str:
    """Which ports are meant: all, only the rendezvous port, or only the others (which NCCL and gloo choose themselves)."""
    numbers = sorted({link.port for link in bad})
    if len(bad) == len(dials):
        return "on any port tried"
    if all(link.is_rendezvous for link in bad):
        return f"on the rendezvous port {numbers[0]}"
    if not any(link.is_rendezvous for link in bad):
        return "on ephemeral ports, which NCCL and gloo need,"
    return f"on ports {listed(map(str, numbers))}"


def _open_firewall(evidence: Evidence, node: str) -> str:
    """Let in the LAN, and only the LAN: all ports, because NCCL and gloo listen on ephemeral ones."""
    configured = evidence.cluster.node(node)
    network = _network(evidence, node)
    ufw = on_node(configured, f"sudo ufw allow from {network}")
    nft = on_node(configured, f"sudo nft insert rule inet filter input ip saddr {network} accept")
    return f"{ufw}; without ufw: {nft}"


def _network(evidence: Evidence, node: str) -> str:
    """The LAN as CIDR: the cluster's, or that of the node's own interface."""
    if evidence.cluster.network:
        return evidence.cluster.network
    address, name = evidence.lan[node]
    facts = evidence.facts.get(node)
    for entry in facts.interfaces if facts else ():
        for own in entry.addresses:
            if entry.name == name and own.split("/")[0] == address and "/" in own:
                return str(ipaddress.ip_interface(own).network)
    return address  # dials start from an address that was found on an interface: a fallback that lets in nobody else


def _address(evidence: Evidence, node: str) -> str:
    return evidence.lan[node][0] if node in evidence.lan else evidence.cluster.node(node).host
