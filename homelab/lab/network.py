"""The lab's own network: a bridge in a namespace of its own, a veth pair to every node, and one to the controller.

The bridge has a namespace of its own because of Docker: where it is installed, the machine's firewall drops the packets that
bridges forward. One interface of the lab is in the machine's namespace; its removal also removes the route.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
from pathlib import Path

from homelab.controller.base.errors import HomelabError, InputError
from homelab.lab.lab_state import LabNode, LabState
from homelab.lab.tools import call

NAMESPACES = Path("/run/netns")
INTERFACE = "eth0"
_RATE = re.compile(r"^(\d+(?:\.\d+)?)(k|m|g)bit$")
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}


def rate_bits_per_s(rate: str) -> float:
    """ "100mbit" -> 1e8. Raises InputError."""
    match = _RATE.match(rate)
    if not match or float(match.group(1)) == 0:
        raise InputError(f'got "{rate}"; allowed: a number and kbit, mbit or gbit', where="--rate", hint="--rate 1gbit")
    return float(match.group(1)) * _UNITS[match.group(2)]


def rate_limit(rate: str) -> tuple[str, ...]:
    """The words for `tc` that limit what an interface sends. The burst holds 2 ms and one 64 KiB packet. Raises InputError."""
    burst_bytes = max(65536 + 14, round(rate_bits_per_s(rate) / 8 * 0.002))
    return ("tbf", "rate", rate, "burst", str(burst_bytes), "latency", "50ms")


def free_network() -> str:
    """A /24 that no route of this machine covers, e.g. "10.213.0.0/24". Raises HomelabError when there is none."""
    taken = []
    for route in json.loads(call("ip", "-j", "-4", "route", "show", "table", "all") or "[]"):
        with contextlib.suppress(ValueError):
            taken.append(ipaddress.ip_network(route["dst"]))  # "default" is no network, and covers nothing in particular
    for prefix in ("10.213", "172.29"):
        for third in range(256):
            candidate = ipaddress.ip_network(f"{prefix}.{third}.0/24")
            if not any(candidate.overlaps(network) for network in taken):
                return str(candidate)
    raise HomelabError(
        "every network the lab could take (10.213.x.0/24, 172.29.x.0/24) is routed elsewhere",
        where="this machine",
        hint="look for forgotten labs or a VPN: ip route",
    )


def address(network: str, number: int) -> str:
    """Node 1 has .11, node 2 .12, ...; the controller .1 (number -9)."""
    return str(ipaddress.ip_network(network)[number + 10])


def namespace(lab: str, name: str) -> str:
    """The name of a node's network namespace."""
    return f"homelab-{lab}-{name}"


def uplink(lab: str) -> str:
    """The lab's only interface in the machine's own namespace."""
    return f"hl{lab}"


def switch_namespace(state: LabState) -> str:
    """The network namespace that holds the bridge."""
    # A plus sign cannot be part of a node's name, so no node can be called like this.
    return f"homelab-{state.id}+switch"


def switch_port(node: LabNode) -> str:
    """The name of the switch's end of the node's cable, in that namespace."""
    return f"port{node.number}"


def create_switch(state: LabState) -> None:
    """The bridge, and the controller's way to it."""
    switch, interface = switch_namespace(state), uplink(state.id)
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "link", "add", "lan", "type", "bridge")
    call("ip", "-n", switch, "link", "set", "lan", "up")
    call("ip", "link", "add", interface, "type", "veth", "peer", "name", "uplink", "netns", switch)
    call("ip", "-n", switch, "link", "set", "uplink", "master", "lan", "up")
    with contextlib.suppress(OSError):  # no IPv6 on this machine: nothing to silence
        Path(f"/proc/sys/net/ipv6/conf/{interface}/disable_ipv6").write_text("1")
    call("ip", "address", "add", f"{address(state.network, -9)}/24", "dev", interface)
    call("ip", "link", "set", interface, "up")


def connect(state: LabState, node: LabNode) -> None:
    """A new network namespace for the node, wired to the bridge; the cable is as `node.cable` says."""
    switch, space = switch_namespace(state), node.network_namespace
    # A machine keeps its hardware address over a power cycle, and so do the neighbours' tables.
    hardware = f"02:{state.id[0:2]}:{state.id[2:4]}:{state.id[4:6]}:00:{node.number:02x}"
    call("ip", "netns", "add", space)
    call(
        *("ip", "-n", switch, "link", "add", switch_port(node), "type", "veth"),
        *("peer", "name", INTERFACE, "address", hardware, "netns", space),
    )
    call("ip", "-n", switch, "link", "set", switch_port(node), "master", "lan")
    call("ip", "-n", space, "link", "set", "lo", "up")
    call("ip", "-n", space, "address", "add", f"{node.host}/24", "dev", INTERFACE)
    if state.rate is not None:
        # Each end limits what it sends, so each direction is limited once.
        for where, device in ((switch, switch_port(node)), (space, INTERFACE)):
            call("tc", "-n", where, "qdisc", "add", "dev", device, "root", *rate_limit(state.rate))
    call("ip", "-n", space, "link", "set", INTERFACE, "up")
    set_cable(state, node)


def set_cable(state: LabState, node: LabNode) -> None:
    """Make the switch's end of the cable what `node.cable` says: the node sees its carrier come and go."""
    call("ip", "-n", switch_namespace(state), "link", "set", switch_port(node), "up" if node.cable == "plugged" else "down")


def silence(state: LabState, node: LabNode) -> None:
    """Drop every packet to and from the node, as if it had lost its power."""
    with contextlib.suppress(HomelabError):  # it has no port when it is off already
        call("ip", "-n", switch_namespace(state), "link", "set", switch_port(node), "down")


def is_plugged(state: LabState, node: LabNode) -> bool | None:
    """Whether the node has a carrier; None when it has no network (it is off)."""
    try:
        links = json.loads(call("ip", "-j", "-n", switch_namespace(state), "link", "show", "dev", switch_port(node)))
    except HomelabError:
        return None
    return "UP" in links[0]["flags"]


def disconnect(state: LabState, node: LabNode) -> None:
    """Remove the node's port and namespace, whatever of them exists."""
    with contextlib.suppress(HomelabError):
        call("ip", "-n", switch_namespace(state), "link", "delete", switch_port(node))
    if (NAMESPACES / node.network_namespace).exists():
        call("ip", "netns", "delete", node.network_namespace)


def namespaces_of(state: LabState) -> list[str]:
    """The lab's network namespaces that exist."""
    try:
        return sorted(name for name in os.listdir(NAMESPACES) if re.match(rf"homelab-{state.id}[-+]", name))
    except FileNotFoundError:
        return []


def interfaces_of(state: LabState) -> list[str]:
    """The lab's interfaces in the machine's own namespace."""
    return [name for name in os.listdir("/sys/class/net") if name == uplink(state.id)]


def remove(state: LabState) -> None:
    """Remove interface and namespaces; and the folder of namespaces where that was ours alone."""
    for name in interfaces_of(state):
        with contextlib.suppress(HomelabError):
            call("ip", "link", "delete", name)
    for name in namespaces_of(state):
        with contextlib.suppress(HomelabError):
            call("ip", "netns", "delete", name)
    # `ip netns add` mounts this folder onto itself and never undoes it; it does so again when it is needed.
    if NAMESPACES.is_dir() and not os.listdir(NAMESPACES):
        with contextlib.suppress(HomelabError, OSError):
            if f" {NAMESPACES} " in Path("/proc/self/mountinfo").read_text():
                call("umount", str(NAMESPACES))
            NAMESPACES.rmdir()
