"""network: every node has its place on the LAN, reaches every other node on any port, and the rendezvous port is free."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from homelab.checks import links
from homelab.checks.commands import answered, on_node
from homelab.checks.evidence import Evidence, Finding
from homelab.checks.majority import majority
from homelab.config.cluster import Node
from homelab.facts import Facts, Interface
from homelab.planning.command import quote_words

ID = "network"
SLOW_CONTROLLER_MS = 100.0  # over this the CLI feels slow; training does not care
SLOW_LINK_MBIT = 1000


def judge(evidence: Evidence) -> Iterator[Finding]:
    """Address, interface and name; then the dials between nodes; then the port on the head."""
    dials = links.judge(evidence)
    for node, facts in answered(evidence):
        found = [*_place(evidence, node, facts), *dials.get(node.name, []), *_latency(evidence, node)]
        if node.name == evidence.head:
            found += _rendezvous_port(evidence, node, facts)
        yield from found or [Finding(ID, node.name, "ok", _summary(evidence, node))]


def _place(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Finding]:
    if node.name not in evidence.lan:
        if len(evidence.cluster.nodes) > 1:
            yield _no_place(evidence, node, facts)
        return
    address, name = evidence.lan[node.name]
    interface = next((entry for entry in facts.interfaces if entry.name == name), None)
    if interface is not None:
        yield from _interface(evidence, node, interface)
    loopback = [own for own in facts.own_name_addresses if own.startswith("127.")]
    if loopback and not address.startswith("127."):
        message = (
            f"its own name, {facts.hostname}, means {loopback[0]} on itself: programs that use the name do not find it"
        )
        yield Finding(ID, node.name, "warn", message, f"edit /etc/hosts on {node.name}: {address} {facts.hostname}")


def _no_place(evidence: Evidence, node: Node, facts: Facts) -> Finding:
    there = "; ".join(
        f"{entry.name} {', '.join(entry.addresses)}"
        for entry in facts.interfaces
        if entry.addresses and entry.kind != "loopback"
    )
    if node.lan_address:
        message = f"no interface holds the lan_address {node.lan_address} of cluster.toml"
    elif node.interface:
        message = f"the interface {node.interface} of cluster.toml is not there or has no address"
    elif evidence.cluster.network:
        message = f"no interface that is up has an address in {evidence.cluster.network}"
    else:
        message = "which of its addresses is on the LAN is not clear"
    hint = f'edit cluster.toml, node {node.name}: lan_address = "..." (or interface); to see them: {on_node(node, "ip -br address")}'
    return Finding(ID, node.name, "fail", f"{message} (there is {there or 'none but loopback'})", hint)


def _interface(evidence: Evidence, node: Node, interface: Interface) -> Iterator[Finding]:
    if interface.kind == "wifi":
        hint = f'plug in a cable, or name another one in cluster.toml, node {node.name}: interface = "..."'
        yield Finding(ID, node.name, "warn", f"{interface.name} is Wi-Fi: slow, and it comes and goes", hint)
    elif interface.speed_mbit is not None and 0 < interface.speed_mbit < SLOW_LINK_MBIT:
        message = f"{interface.name} runs at {interface.speed_mbit} Mbit/s"
        yield Finding(
            ID,
            node.name,
            "warn",
            message,
            f"change the cable or the switch, then: {on_node(node, f'cat /sys/class/net/{interface.name}/speed')}",
        )
    sizes = _mtus(evidence)
    if node.name in sizes:
        common = majority(sizes, evidence.head)
        if sizes[node.name] != common:
            message = f"{interface.name} has MTU {sizes[node.name]}, the other nodes {common}: large packets may vanish"
            yield Finding(
                ID,
                node.name,
                "warn",
                message,
                on_node(node, f"sudo {quote_words(['ip', 'link', 'set', 'dev', interface.name, 'mtu', str(common)])}"),
            )


def _mtus(evidence: Evidence) -> dict[str, int]:
    """MTU of each node's LAN interface, where known."""
    sizes = {}
    for node, facts in answered(evidence):
        for entry in facts.interfaces:
            if node.name in evidence.lan and entry.name == evidence.lan[node.name][1] and entry.mtu:
                sizes[node.name] = entry.mtu
    return sizes


def _latency(evidence: Evidence, node: Node) -> Iterator[Finding]:
    latency_ms = evidence.latencies_ms.get(node.name)
    if latency_ms is not None and latency_ms > SLOW_CONTROLLER_MS:
        message = f"{latency_ms:.0f} ms from this machine: commands will be slow (training will not)"
        yield Finding(
            ID,
            node.name,
            "warn",
            message,
            f"is this machine on Wi-Fi or a VPN? {quote_words(['ping', '-c', '5', node.host])}",
        )


def _rendezvous_port(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Finding]:
    if facts.port is None or facts.port.free:
        return
    port = evidence.master_port
    other = f"edit the recipe: [parallel] port = {port + 1 if port < 65535 else port - 1}"
    if facts.port.holder_run:
        holder, hint = f"run {facts.port.holder_run}", quote_words(["homelab", "stop", facts.port.holder_run])
    elif facts.port.holder_pid:
        holder = f"{facts.port.holder or 'a process'} (pid {facts.port.holder_pid})"
        hint = f"{on_node(node, f'kill {facts.port.holder_pid}')}; or {other}"
    else:
        holder = "a process of another user"
        hint = f"{other}; to see it: {on_node(node, f'sudo ss -tlnp sport = :{port}')}"
    yield Finding(ID, node.name, "fail", f"the rendezvous port {port} is held by {holder}", hint)


def _summary(evidence: Evidence, node: Node) -> str:
    if node.name not in evidence.lan:
        return "one node: nothing to reach"
    address, interface = evidence.lan[node.name]
    best = links.best_ms(evidence, node.name)
    shown = ipaddress.ip_address(address)
    return f"{shown} on {interface}" + (f", {best:.1f} ms" if best is not None else "")
