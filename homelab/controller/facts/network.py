"""A node's places on its networks."""

from __future__ import annotations

from homelab.controller.base.models import WireModel
from homelab.controller.facts.base import Address, Addresses, Mac, Pid, Run


class Interface(WireModel):
    """One network interface; `addresses` are "192.168.1.100/24"."""

    name: str
    up: bool = True
    addresses: Addresses = ()
    kind: str = "physical"  # physical | wifi | virtual | loopback
    mtu: int | None = None
    speed_mbit: int | None = None
    mac: Mac | None = None
    wakes: bool | None = None  # a magic packet wakes the machine; None where the card does not say


class Route(WireModel):
    """How this node reaches a peer: by which interface, from which of its own addresses."""

    interface: str
    source: Address


class PortFacts(WireModel):
    """Whether a port can be bound; if not, who holds it as far as this user may see."""

    free: bool
    holder: str | None = None
    holder_pid: Pid = None
    holder_run: Run | None = None


class NetworkFacts(WireModel):
    """Interfaces, routes to the peers, the node's own name, the rendezvous port, and the firewall."""

    interfaces: tuple[Interface, ...] = ()
    own_name_addresses: tuple[str, ...] = ()
    routes: dict[str, Route] = {}
    port: PortFacts | None = None
    firewall: str | None = None  # "ufw" | "firewalld" | "nftables"; None: none was seen, but there may be one
    firewall_chains: tuple[str, ...] = ()  # of nftables: "inet filter input", each that can drop what comes in
    firewall_out: str | None = None  # "ufw" | "nftables": what can stop outgoing packets; None: none was seen
    firewall_out_chains: tuple[str, ...] = ()
    firewall_seen: bool = False  # the active rules could be read: the lists of chains are complete
    wsl: str | None = None  # inside of WSL: how it reaches the network ("nat", "mirrored", ...); None elsewhere
