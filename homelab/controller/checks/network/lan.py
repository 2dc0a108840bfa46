"""network: every node has its place on the LAN, reaches every other node on any port, and the rendezvous port is free."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from homelab.controller.base.hint import NO_COMMAND, Hint, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine import runs as alive
from homelab.controller.checks.network import connectivity, nat
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, on_node

_HOSTNAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SLOW_CONTROLLER_MS = 100.0  # over this the CLI feels slow; training does not care


@check("network.place", "the node has an address on the LAN", worst="fail", sees="network", is_certain=True)
def place(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a node of several has no place on the LAN."""
    if node.name in evidence.lan or len(evidence.cluster.nodes) < 2:
        return
    addresses = "; ".join(
        f"{entry.name} {', '.join(entry.addresses)}" for entry in facts.network.interfaces if entry.addresses and entry.kind != "loopback"
    )
    if node.lan_address:
        message = f"no interface has the lan_address {node.lan_address} of cluster.toml"
    elif node.interface:
        message = f"the interface {node.interface} of cluster.toml is not there or has no address"
    elif evidence.cluster.network:
        message = f"no interface that is up has an address in {evidence.cluster.network}"
    else:
        message = "homelab cannot tell which of its addresses is on the LAN"
    hint = f'edit cluster.toml, node {node.name}: lan_address = "..." (or interface); to see them: {on_node(node, "ip -br address")}'
    behind = nat.explanation(evidence, node.name)
    yield Problem("fail", f"{message} (it has {addresses or 'only loopback'})", behind.hint if behind else hint)


@check("network.name", "the node's own name does not resolve to 127.x on the node", worst="warn", sees="network", after="network.virtual")
def name(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the node's own name means itself only, as Debian and Ubuntu set it up."""
    if node.name not in evidence.lan:
        return
    address = evidence.lan[node.name][0]
    loopback = [own for own in facts.network.own_name_addresses if own.startswith("127.")]
    if loopback and not address.startswith("127."):
        message = (
            f"its own name, {facts.system.hostname}, resolves to {loopback[0]} on the node: other nodes cannot reach it by that address"
        )
        if not _HOSTNAME.fullmatch(facts.system.hostname):  # it would become part of a program of sed
            yield Problem(
                "warn", message, f"give it a usable name: {as_root(node, facts, quote_words(['hostnamectl', 'hostname', node.name]))}"
            )
            return
        hint = f"edit /etc/hosts on {node.name}: {address} {facts.system.hostname}"
        yield Problem("warn", message, hint, as_root(node, facts, _name_in_hosts(address, facts.system.hostname)))


def _name_in_hosts(address: str, hostname: str) -> str:
    """Takes the name off the lines of 127.*, and adds its own. Written in place: /etc/hosts of a container is a mount."""
    sed = f"/^127\\./s/[[:space:]]+{re.escape(hostname)}([[:space:]]|$)/\\1/g"
    lines = f"hosts=$(sed -E {quote_words([sed])} /etc/hosts) && printf '%s\\n' \"$hosts\" {quote_words([f'{address} {hostname}'])} > /etc/hosts"
    return quote_words(["sh", "-c", lines])


@check("network.controller", f"the node is within {SLOW_CONTROLLER_MS:.0f} ms of this machine", worst="warn", sees="login")
def controller(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn where the node is far from this machine."""
    latency_ms = evidence.latencies_ms.get(node.name)
    if latency_ms is not None and latency_ms > SLOW_CONTROLLER_MS:
        message = f"{latency_ms:.0f} ms from this machine: commands will be slow (training will not)"
        yield Problem("warn", message, f"is this machine on Wi-Fi or a VPN? {quote_words(['ping', '-c', '5', node.host])}")


# What listens on a node's ports while another command looks at its network (`homelab.node.network.connectivity`): it needs no fix.
_OWN_LISTENER = "-m homelab.node meet"


@check("network.port", "the rendezvous port is free on the head", worst="fail", sees="network", after="network.reach", is_certain=True)
def port(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the rendezvous port is held on the head."""
    if node.name != evidence.head or facts.network.port is None or facts.network.port.free:
        return
    number = evidence.master_port
    other = f"edit the recipe: [parallel] port = {number + 1 if number < 65535 else number - 1}"
    fix, hint = NO_COMMAND, ""
    if facts.network.port.holder_run:
        holder = f"run {facts.network.port.holder_run}" + (
            f" (pid {facts.network.port.holder_pid})" if facts.network.port.holder_pid else ""
        )
        if alive.why_stale(facts, facts.network.port.holder_run):
            hint = fix = homelab("stop", facts.network.port.holder_run)
        else:
            holder += f", which {alive.what_it_does(evidence, node, facts, facts.network.port.holder_run)}"
            hint = Hint("start after it: {}; or {}", alive.after(facts.network.port.holder_run), other)
    elif _OWN_LISTENER in (facts.network.port.holder or ""):
        holder = f"another homelab command, which tests it now (pid {facts.network.port.holder_pid})"
        hint = (
            "wait until that preflight, launch or recovery has tested the network (half a minute at most), then run the same command again"
        )
    elif facts.network.port.holder_pid:  # only root and the process's own user see the pid
        holder = f"{facts.network.port.holder or 'a process'} (pid {facts.network.port.holder_pid})"
        fix = on_node(node, f"kill {facts.network.port.holder_pid}")
        hint = Hint("{}; or {}", fix, other)
    else:
        holder = "a process of another user"
        hint = f"{other}; to see it: {as_root(node, facts, f'ss -tlnp sport = :{number}')}"
    yield Problem("fail", f"the rendezvous port {number} is in use by {holder}", hint, fix)


@subject("network", "every node reaches every other one on any port, at the speed of the network", after="gpu")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if node.name not in evidence.lan:
        return "one node: nothing to reach"
    address, interface = evidence.lan[node.name]
    best = connectivity.best_ms(evidence, node.name)
    own_address = ipaddress.ip_address(address)
    return f"{own_address} on {interface}" + (f", {best:.1f} ms" if best is not None else "")
