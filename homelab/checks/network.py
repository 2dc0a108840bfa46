"""network: every node has its place on the LAN, reaches every other node on any port, and the rendezvous port is free."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from homelab.checks import interfaces, links, nat, wires
from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import as_root, on_node
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning.command import quote_words

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SLOW_CONTROLLER_MS = 100.0  # over this the CLI feels slow; training does not care


def place(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a node of several has no place on the LAN."""
    if node.name in evidence.lan or len(evidence.cluster.nodes) < 2:
        return
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
    behind = nat.explanation(evidence, node.name)
    yield Problem("fail", f"{message} (there is {there or 'none but loopback'})", behind.hint if behind else hint)


def name(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the node's own name means itself only, as Debian and Ubuntu set it up."""
    if node.name not in evidence.lan:
        return
    address = evidence.lan[node.name][0]
    loopback = [own for own in facts.own_name_addresses if own.startswith("127.")]
    if loopback and not address.startswith("127."):
        message = (
            f"its own name, {facts.hostname}, means {loopback[0]} on itself: programs that use the name do not find it"
        )
        if not _HOSTNAME.fullmatch(facts.hostname):  # it would become part of a program of sed
            yield Problem("warn", message, f"give it a usable name: {as_root(node, facts, quote_words(['hostnamectl', 'hostname', node.name]))}")
            return
        hint = f"edit /etc/hosts on {node.name}: {address} {facts.hostname}"
        yield Problem("warn", message, hint, as_root(node, facts, _name_in_hosts(address, facts.hostname)))


def _name_in_hosts(address: str, hostname: str) -> str:
    """Takes the name off the lines of 127.*, and adds its own. Written in place: /etc/hosts of a container is a mount."""
    sed = f"/^127\\./s/[[:space:]]+{re.escape(hostname)}([[:space:]]|$)/\\1/g"
    lines = f"hosts=$(sed -E {quote_words([sed])} /etc/hosts) && printf '%s\\n' \"$hosts\" {quote_words([f'{address} {hostname}'])} > /etc/hosts"
    return quote_words(["sh", "-c", lines])


def controller(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the node is far from this machine."""
    latency_ms = evidence.latencies_ms.get(node.name)
    if latency_ms is not None and latency_ms > SLOW_CONTROLLER_MS:
        message = f"{latency_ms:.0f} ms from this machine: commands will be slow (training will not)"
        yield Problem(
            "warn", message, f"is this machine on Wi-Fi or a VPN? {quote_words(['ping', '-c', '5', node.host])}"
        )


# What listens on a node's ports while another command looks at its network (`homelab.node.dials`): nobody has to end it.
_OWN_LISTENER = "-m homelab.node meet"


def port(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the rendezvous port is held on the head."""
    if node.name != evidence.head or facts.port is None or facts.port.free:
        return
    number = evidence.master_port
    other = f"edit the recipe: [parallel] port = {number + 1 if number < 65535 else number - 1}"
    fix = ""
    if facts.port.holder_run:
        holder = f"run {facts.port.holder_run}" + (f" (pid {facts.port.holder_pid})" if facts.port.holder_pid else "")
        hint = fix = quote_words(["homelab", "stop", facts.port.holder_run])
    elif _OWN_LISTENER in (facts.port.holder or ""):
        holder = f"another homelab command, which tries it just now (pid {facts.port.holder_pid})"
        hint = "wait until that preflight, launch or recovery has looked at the network, half a minute at most, then the same command again"
    elif facts.port.holder_pid:  # only root and the process's own user see the pid
        holder = f"{facts.port.holder or 'a process'} (pid {facts.port.holder_pid})"
        fix = on_node(node, f"kill {facts.port.holder_pid}")
        hint = f"{fix}; or {other}"
    else:
        holder = "a process of another user"
        hint = f"{other}; to see it: {as_root(node, facts, f'ss -tlnp sport = :{number}')}"
    yield Problem("fail", f"the rendezvous port {number} is held by {holder}", hint, fix)


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if node.name not in evidence.lan:
        return "one node: nothing to reach"
    address, interface = evidence.lan[node.name]
    best = links.best_ms(evidence, node.name)
    shown = ipaddress.ip_address(address)
    return f"{shown} on {interface}" + (f", {best:.1f} ms" if best is not None else "")


SUBJECT = Subject(
    "network",
    "every node reaches every other one on any port, at the speed of the wire",
    (
        Check("network.place", "the node has an address on the LAN", "fail", "network", of_node=place),
        Check("network.nat", "no translated address stands between the node and the others (WSL2, port forwarding)", "fail", "network", of_node=nat.judge),
        Check("network.reach", "every node opens connections to every other one, on the rendezvous port and on ephemeral ones", "fail", "dials", of_cluster=links.reach),
        Check("network.port", "the rendezvous port is free on the head", "fail", "network", of_node=port),
        Check("network.loss", "no packets are lost on the way between two nodes, in either direction", "fail", "dials", of_cluster=wires.loss),
        Check("network.path_mtu", "packets of full size arrive, in both directions of every pair", "fail", "dials", of_cluster=wires.path_mtu),
        Check("network.throughput", "bytes arrive at about the same speed between all nodes", "fail", "dials", of_cluster=wires.throughput),
        Check("network.latency", "connections between the nodes open quickly and steadily", "warn", "dials", of_cluster=links.latency),
        Check("network.wifi", "the node is on a cable", "warn", "network", of_node=interfaces.wifi),
        Check("network.speed", f"the cable runs at {interfaces.SLOW_LINK_MBIT} Mbit/s or more", "warn", "network", of_node=interfaces.speed),
        Check("network.mtu", "all nodes send packets of the same size", "warn", "network", of_node=interfaces.mtu),
        Check("network.subnets", "only one interface is in the LAN's subnet", "warn", "network", of_node=interfaces.subnets),
        Check("network.virtual", "the node's place on the LAN is no tunnel and no bridge of containers", "warn", "network", of_node=interfaces.virtual),
        Check("network.name", "the node's own name does not mean 127.x on itself", "warn", "network", of_node=name),
        Check("network.controller", f"the node is within {SLOW_CONTROLLER_MS:.0f} ms of this machine", "warn", "login", of_node=controller),
    ),
    _summary,
)  # fmt: skip
