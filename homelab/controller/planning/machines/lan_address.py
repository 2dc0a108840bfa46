"""Which address and interface of each node is its place on the LAN. Names differ between machines, so it is chosen per node."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import InputError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.network import Interface
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.types import Choice

_TUNNELS = ("tailscale", "wg", "zt", "tun", "tap", "nebula")


def peers_of(cluster: Cluster, name: str) -> list[str]:
    """Addresses of the other nodes as far as cluster.toml says them: what a node is asked for its routes to."""
    peers = []
    for node in cluster.nodes:
        address = node.lan_address or (node.host if _is_address(node.host) else None)
        if node.name != name and address:
            peers.append(address)
    return peers


def lan_of(cluster: Cluster, node: Node, facts: Facts | None) -> tuple[str, str, str] | None:
    """(address, interface, reason) of a node on the LAN, or None when nothing fits.

    In this order: what cluster.toml says, the cluster's network, the address SSH uses, the route to the other nodes, the
    only physical interface that is up. Docker's, bridges' and tunnels' interfaces are taken only when cluster.toml names them, or
    (tunnels alone) a network that nothing else is in.
    """
    interfaces = facts.network.interfaces if facts else ()
    if node.lan_address:
        interface = node.interface or _holding(interfaces, node.lan_address)
        if interface is None and node.lan_address.startswith("127."):
            interface = "lo"
        if interface is None and facts is not None:
            return None
        return node.lan_address, interface or "?", "cluster.toml says so"
    if node.interface:
        address = _address_on(interfaces, node.interface)
        return (address, node.interface, "cluster.toml names the interface") if address else None
    usable = [entry for entry in interfaces if entry.kind in ("physical", "wifi") and entry.up]
    usable.sort(key=lambda entry: entry.kind == "wifi")  # a laptop with both is on the LAN by its cable
    if cluster.network:
        # A tunnel is asked for by a network that only it is in; a bridge of containers never is.
        tunnels = [entry for entry in interfaces if entry.up and entry.name.startswith(_TUNNELS)]
        found = _in_network([*usable, *tunnels], cluster.network)
        if found:
            return *found, f"in the cluster's network {cluster.network}"
    if _is_address(node.host):
        interface = _holding(usable, node.host)
        if interface:
            return node.host, interface, "the address SSH uses"
    for route in (facts.network.routes if facts else {}).values():
        if any(entry.name == route.interface for entry in usable):
            return route.source, route.interface, "the route to the other nodes"
    with_address = [entry for entry in usable if entry.addresses]
    if len(with_address) == 1:
        return _plain(with_address[0].addresses[0]), with_address[0].name, "the only physical interface that is up"
    if facts is None and _is_address(node.host):
        return node.host, "?", "not asked (offline): the address SSH uses"
    return None


def _in_network(interfaces: Iterable[Interface], network: str) -> tuple[str, str] | None:
    """(address, interface) of the first one that is in the network."""
    inside = ipaddress.ip_network(network)
    return next(
        (
            (_plain(address), entry.name)
            for entry in interfaces
            for address in entry.addresses
            if ipaddress.ip_interface(address).ip in inside
        ),
        None,
    )


def lan_of_all(cluster: Cluster, facts: Mapping[str, Facts]) -> dict[str, tuple[str, str]]:
    """{node: (address, interface)} for the nodes whose place on the LAN is known."""
    addresses = {}
    for node in cluster.nodes:
        if node.name in facts:
            choice = lan_of(cluster, node, facts[node.name])
            if choice:
                addresses[node.name] = choice[:2]
    return addresses


@dataclass(frozen=True)
class LanAddress:
    """A node's address and interface on the LAN."""

    address: str
    interface: str


def choose(cluster: Cluster, machines: Machines) -> tuple[dict[str, LanAddress], list[Choice]]:
    """Every node's place on the LAN, with the reasons. Raises InputError for a node whose place is not clear."""
    addresses, choices = {}, []
    for node in machines.nodes:
        facts = machines.facts.get(node.name)
        chosen = lan_of(cluster, node, facts)
        if chosen is None and len(machines.nodes) == 1:
            chosen = ("127.0.0.1", "lo", "a single node needs no LAN")
        if chosen is None:
            listed = ", ".join(f"{entry.name} {' '.join(entry.addresses)}" for entry in (facts.network.interfaces if facts else ()))
            raise InputError(
                f"which address of {node.name} is on the LAN is not clear{f' (it has {listed})' if listed else ''}",
                where=f"cluster.toml, node {node.name}",
                hint='set lan_address = "..." (and interface = "...") for this node, or network = "..." in [cluster]',
            )
        address, interface, because = chosen
        addresses[node.name] = LanAddress(address, interface)
        choices.append(Choice(subject=f"LAN address of {node.name}", value=f"{address} on {interface}", because=because))
    return addresses, choices


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _plain(address: str) -> str:
    return address.split("/")[0]


def _holding(interfaces: Sequence[Interface], address: str) -> str | None:
    for entry in interfaces:
        if any(_plain(own) == address for own in entry.addresses):
            return entry.name
    return None


def _address_on(interfaces: Sequence[Interface], name: str) -> str | None:
    for entry in interfaces:
        if entry.name == name and entry.addresses:
            return _plain(entry.addresses[0])
    return None
