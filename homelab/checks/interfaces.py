"""The interface by which each node stands on the LAN: its kind, its speed, the size of its packets, and its neighbours."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from homelab.checks.check import Problem
from homelab.checks.commands import answered, as_root, on_node
from homelab.checks.evidence import Evidence
from homelab.checks.majority import majority
from homelab.config.cluster import Node
from homelab.facts import Facts, Interface
from homelab.planning.command import quote_words

SLOW_LINK_MBIT = 1000


def chosen(evidence: Evidence, node: Node, facts: Facts) -> Interface | None:
    """The interface of this node's place on the LAN, where both are known."""
    if node.name not in evidence.lan:
        return None
    name = evidence.lan[node.name][1]
    return next((entry for entry in facts.interfaces if entry.name == name), None)


def wifi(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn on Wi-Fi."""
    interface = chosen(evidence, node, facts)
    if interface is not None and interface.kind == "wifi":
        hint = f'plug in a cable, or name another one in cluster.toml, node {node.name}: interface = "..."'
        yield Problem("warn", f"{interface.name} is Wi-Fi: slow, and it comes and goes", hint)


def speed(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where a cable has agreed on less than 1000 Mbit/s."""
    interface = chosen(evidence, node, facts)
    if interface is None or interface.kind != "physical" or interface.speed_mbit is None:
        return
    if 0 < interface.speed_mbit < SLOW_LINK_MBIT:
        message = f"{interface.name} runs at {interface.speed_mbit} Mbit/s"
        look = on_node(node, quote_words(["cat", f"/sys/class/net/{interface.name}/speed"]))
        yield Problem("warn", message, f"change the cable or the switch, then: {look}")


def mtu(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the size of packets differs from that of most nodes."""
    interface = chosen(evidence, node, facts)
    sizes = _mtus(evidence)
    if interface is None or node.name not in sizes:
        return
    common = majority(sizes, evidence.head)
    if sizes[node.name] != common:
        message = f"{interface.name} has MTU {sizes[node.name]}, the other nodes {common}: large packets may vanish"
        words = ["ip", "link", "set", "dev", interface.name, "mtu", str(common)]
        fix = as_root(node, facts, quote_words(words))
        # A smaller one may be the mend of `network.path_mtu`: `--fix` would take it back, and find it again, in turn.
        is_lowered = sizes[node.name] < common
        hint = f"was it lowered because the way carries no more? Then leave it; else: {fix}" if is_lowered else fix
        yield Problem("warn", message, hint, "" if is_lowered else fix)


def _mtus(evidence: Evidence) -> dict[str, int]:
    """MTU of each node's LAN interface, where known."""
    sizes = {}
    for node, facts in answered(evidence):
        interface = chosen(evidence, node, facts)
        if interface is not None and interface.mtu:
            sizes[node.name] = interface.mtu
    return sizes


def subnets(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where a second interface that is up has an address in the LAN's subnet: the kernel may answer on the other one."""
    interface = chosen(evidence, node, facts)
    if interface is None or interface.kind == "loopback":
        return
    address = evidence.lan[node.name][0]
    own = _network(next((entry for entry in interface.addresses if entry.split("/")[0] == address), ""))
    for other in facts.interfaces:
        # A bridge without a running container has no carrier, and its route takes the LAN's packets all the same.
        is_there = other.up or other.kind == "virtual"
        if own is None or other.name == interface.name or other.kind == "loopback" or not is_there:
            continue
        for theirs in other.addresses:
            network = _network(theirs)
            if network is not None and network.overlaps(own):
                yield _second(node, facts, interface, other, theirs, own)
                break


def _second(
    node: Node, facts: Facts, interface: Interface, other: Interface, theirs: str, own: ipaddress.IPv4Network
) -> Problem:
    message = f"{interface.name} and {other.name} ({theirs}) are both in {own}: packets may leave and be answered by the wrong one"
    if other.kind == "virtual":
        hint = f"give {other.name} another subnet (Docker: default-address-pools in /etc/docker/daemon.json), then: {on_node(node, 'ip -br address')}"
        return Problem("warn", message, hint)
    off = as_root(node, facts, quote_words(["ip", "link", "set", "dev", other.name, "down"]))
    hint = f'unplug or switch off the one that is not meant, or name the right one in cluster.toml, node {node.name}: interface = "{interface.name}" and: {off}'
    return Problem("warn", message, hint)


def _network(address: str) -> ipaddress.IPv4Network | None:
    """The subnet of "192.168.1.5/24"; None for what shares one with nobody (a tunnel's /32)."""
    try:
        network = ipaddress.ip_interface(address).network
    except ValueError:
        return None
    return network if isinstance(network, ipaddress.IPv4Network) and network.prefixlen < 31 else None


def virtual(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the place on the LAN is a tunnel or a bridge of containers, which only cluster.toml can have asked for."""
    interface = chosen(evidence, node, facts)
    if interface is not None and interface.kind == "virtual":
        message = f"{interface.name} is a tunnel or a virtual bridge, as cluster.toml asks: every byte of the training goes through it"
        hint = f"where the nodes share a LAN, leave lan_address and interface of node {node.name} out of cluster.toml"
        yield Problem("warn", message, hint)
