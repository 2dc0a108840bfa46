"""The interface by which each node stands on the LAN: its kind, its speed, the size of its packets, and its neighbours."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from homelab.controller.base.hint import NO_COMMAND, Hint
from homelab.controller.base.shell import quote_words
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence, answered, majority
from homelab.controller.config.cluster import Node
from homelab.controller.facts.network import Interface
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, on_node

SLOW_LINK_MBIT = 1000


def chosen(evidence: Evidence, node: Node, facts: Facts) -> Interface | None:
    """The interface of this node's place on the LAN, where both are known."""
    if node.name not in evidence.lan:
        return None
    name = evidence.lan[node.name][1]
    return next((entry for entry in facts.network.interfaces if entry.name == name), None)


@check("network.wifi", "the node is on a cable", worst="warn", sees="network", after="network.latency")
def wifi(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn on Wi-Fi."""
    interface = chosen(evidence, node, facts)
    if interface is not None and interface.kind == "wifi":
        hint = f'plug in a cable, or name another one in cluster.toml, node {node.name}: interface = "..."'
        yield Problem("warn", f"{interface.name} is Wi-Fi: slow and unreliable", hint)


@check("network.speed", f"the cable runs at {SLOW_LINK_MBIT} Mbit/s or more", worst="warn", sees="network")
def speed(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where a cable has agreed on less than 1000 Mbit/s."""
    interface = chosen(evidence, node, facts)
    if interface is None or interface.kind != "physical" or interface.speed_mbit is None:
        return
    if 0 < interface.speed_mbit < SLOW_LINK_MBIT:
        message = f"{interface.name} runs at {interface.speed_mbit} Mbit/s"
        command = on_node(node, quote_words(["cat", f"/sys/class/net/{interface.name}/speed"]))
        yield Problem("warn", message, f"change the cable or the switch, then: {command}")


@check("network.mtu", "all nodes send packets of the same size", worst="warn", sees="network")
def mtu(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the size of packets differs from that of most nodes."""
    interface = chosen(evidence, node, facts)
    sizes = _mtus(evidence)
    if interface is None or node.name not in sizes:
        return
    common = majority(sizes, evidence.head)
    if sizes[node.name] != common:
        message = f"{interface.name} has MTU {sizes[node.name]}, the other nodes {common}: large packets may be lost"
        words = ["ip", "link", "set", "dev", interface.name, "mtu", str(common)]
        fix = as_root(node, facts, quote_words(words))
        # A smaller one may be the fix of `network.path_mtu`: `--fix` would undo it, and the next preflight would find it again.
        is_lowered = sizes[node.name] < common
        hint = Hint("was it lowered on purpose, for a VPN or a switch? Then leave it; if not: {}", fix) if is_lowered else ""
        yield Problem("warn", message, hint, NO_COMMAND if is_lowered else fix)


def _mtus(evidence: Evidence) -> dict[str, int]:
    """MTU of each node's LAN interface, where known."""
    sizes = {}
    for node, facts in answered(evidence):
        interface = chosen(evidence, node, facts)
        if interface is not None and interface.mtu:
            sizes[node.name] = interface.mtu
    return sizes


@check("network.subnets", "only one interface is in the LAN's subnet", worst="warn", sees="network")
def subnets(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where a second interface that is up has an address in the LAN's subnet: the kernel may answer on the other one."""
    interface = chosen(evidence, node, facts)
    if interface is None or interface.kind == "loopback":
        return
    address = evidence.lan[node.name][0]
    own = _network(next((entry for entry in interface.addresses if entry.split("/")[0] == address), ""))
    for other in facts.network.interfaces:
        # A bridge without a running container has no carrier, and its route takes the LAN's packets all the same.
        is_there = other.up or other.kind == "virtual"
        if own is None or other.name == interface.name or other.kind == "loopback" or not is_there:
            continue
        for other_address in other.addresses:
            network = _network(other_address)
            if network is not None and network.overlaps(own):
                yield _second(node, facts, interface, other, other_address, own)
                break


def _second(node: Node, facts: Facts, interface: Interface, other: Interface, other_address: str, own: ipaddress.IPv4Network) -> Problem:
    message = (
        f"{interface.name} and {other.name} ({other_address}) are both in {own}: packets may leave by one and be answered by the other"
    )
    if other.kind == "virtual":
        hint = f"give {other.name} another subnet (Docker: default-address-pools in /etc/docker/daemon.json), then: {on_node(node, 'ip -br address')}"
        return Problem("warn", message, hint)
    off = as_root(node, facts, quote_words(["ip", "link", "set", "dev", other.name, "down"]))
    hint = f'unplug or switch off the wrong one, or name the right one in cluster.toml, node {node.name}: interface = "{interface.name}" and: {off}'
    return Problem("warn", message, hint)


def _network(address: str) -> ipaddress.IPv4Network | None:
    """The subnet of "192.168.1.5/24"; None for an address without neighbours (a tunnel's /32)."""
    try:
        network = ipaddress.ip_interface(address).network
    except ValueError:
        return None
    return network if isinstance(network, ipaddress.IPv4Network) and network.prefixlen < 31 else None


@check("network.virtual", "the node's LAN interface is no tunnel and no container bridge", worst="warn", sees="network")
def virtual(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the place on the LAN is a tunnel or a bridge of containers, which only cluster.toml can have asked for."""
    interface = chosen(evidence, node, facts)
    if interface is not None and interface.kind == "virtual":
        message = f"{interface.name} is a tunnel or a virtual bridge, as cluster.toml asks: every byte of the training goes through it"
        hint = f"if the nodes share a LAN, take lan_address and interface of node {node.name} out of cluster.toml"
        yield Problem("warn", message, hint)
