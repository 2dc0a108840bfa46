"""Misconfigurations between a node and its switch: a slow or a long cable, packets that do not pass, a second cable, NAT."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.lab import network, sshd
from homelab.lab.lab import Lab
from homelab.lab.network import INTERFACE
from homelab.lab.tools import call, program
from scripts.practice.misconfigurations import frame_relay
from scripts.practice.misconfigurations.misconfiguration import NotInjectable, add, misconfiguration, peer_of
from scripts.practice.misconfigurations.node_changes import cluster_says, inside, needs

SMALL_PACKET = 1400
_TABLE = "homelab_fault"


def on_switch(lab: Lab, *command: str) -> str:
    """Run a program in the switch's network namespace."""
    return call("nsenter", f"--net={network.NAMESPACES / network.switch_namespace(lab.state)}", *command)


@contextlib.contextmanager
def limited(lab: Lab, node: str, rate: str) -> Iterator[None]:
    """The node's cable carries no more than `rate` in each direction."""
    lab_node = lab.state.node(node)
    ends = ((network.switch_namespace(lab.state), network.switch_port(lab_node)), (lab_node.network_namespace, INTERFACE))
    try:
        for space, device in ends:
            call("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *network.rate_limit(rate))
        yield
    finally:
        for space, device in ends:
            if lab.state.rate is None:
                call("tc", "-n", space, "qdisc", "delete", "dev", device, "root")
            else:
                call("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *network.rate_limit(lab.state.rate))


add("slow-cable", "one node's cable carries 10 Mbit/s", "network.throughput", inject=lambda lab, node: limited(lab, node, "10mbit"))


@misconfiguration("mtu", "one node has MTU 1400, all others 1500", "network.mtu")
def mtu(lab: Lab, node: str) -> Iterator[None]:
    """As a VPN leaves it."""
    before = inside(lab, node, "cat", f"/sys/class/net/{INTERFACE}/mtu").strip()
    inside(lab, node, "ip", "link", "set", "dev", INTERFACE, "mtu", str(SMALL_PACKET))
    try:
        yield
    finally:
        inside(lab, node, "ip", "link", "set", "dev", INTERFACE, "mtu", before)


@misconfiguration(
    "big-packets-vanish", "packets over 1400 bytes are lost at one node's port of the switch",
    "network.path_mtu", "network.throughput",
)  # fmt: skip
def big_packets_vanish(lab: Lab, node: str) -> Iterator[None]:
    """Every interface says 1500, a connect works, and the first large message never arrives."""
    port = network.switch_port(lab.state.node(node))
    # Packets of the controller pass.
    with forwarding(lab, *(
        f"iifname {come} oifname {leave} meta length > {SMALL_PACKET} drop"
        for come, leave in ((f'"{port}"', '!= "uplink"'), ('!= "uplink"', f'"{port}"'))
    )):  # fmt: skip
        yield


@contextlib.contextmanager
def forwarding(lab: Lab, *rules: str) -> Iterator[None]:
    """The switch has these rules of nft for the packets that it forwards."""
    needs("nft", package="nftables")
    chain = "\n".join(rules)
    try:
        on_switch(lab, "nft", f"table bridge {_TABLE} {{\nchain fault {{\ntype filter hook forward priority 0\n{chain}\n}}\n}}")
    except HomelabError as error:
        raise NotInjectable(error.message, where="the switch", hint="is the kernel built with nft's bridge tables?") from error
    try:
        yield
    finally:
        on_switch(lab, "nft", "delete", "table", "bridge", _TABLE)


def losing(lab: Lab, node: str, percent: int, *, to: str | None = None) -> contextlib.AbstractContextManager[None]:
    """The switch drops `percent` of the packets that leave the node; with `to`, only of those to that node."""
    come = network.switch_port(lab.state.node(node))
    leave = f'oifname "{network.switch_port(lab.state.node(to))}"' if to else 'oifname != "uplink"'
    return forwarding(lab, f'iifname "{come}" {leave} numgen random mod 100 < {percent} drop')


add(
    "loss-5", "5 % of the packets from one node to another are lost", "network.loss",
    inject=lambda lab, node: losing(lab, node, 5, to=peer_of(lab, node)), where="pair",
)  # fmt: skip
# Looks by turns like a firewall, a wrong MTU and a slow cable.
add(
    "loss-20", "20 % of the packets from one node to another are lost", "network.loss",
    inject=lambda lab, node: losing(lab, node, 20, to=peer_of(lab, node)), where="pair",
)  # fmt: skip
add("loss-all-ways", "8 % of all packets from one node are lost", "network.loss", inject=lambda lab, node: losing(lab, node, 8))


@contextlib.contextmanager
def relayed(lab: Lab, node: str, delay_s: float) -> Iterator[None]:
    """Frames between the node and the switch take `delay_s` in each direction."""
    if not Path("/dev/net/tun").exists():
        raise NotInjectable("there is no /dev/net/tun", where="this machine", hint="modprobe tun")
    port = network.switch_port(lab.state.node(node))
    far = f"far{lab.state.node(node).number}"
    space = network.NAMESPACES / network.switch_namespace(lab.state)
    command = [program("nsenter"), f"--net={space}", sys.executable, "-I", "-S", str(Path(frame_relay.__file__).resolve())]
    process = subprocess.Popen(
        [*command, port, far, str(delay_s)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        env={"PATH": sshd.SYSTEM_PATH, **lab.state.environment(lab.state.node(node))}, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise NotInjectable("frames cannot be passed on here", where="the switch", hint="see what it printed")
        on_switch(lab, "ip", "link", "set", port, "nomaster")
        on_switch(lab, "ip", "link", "set", far, "master", "lan", "up")
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        on_switch(lab, "ip", "link", "set", port, "master", "lan")


# As over powerline, a mesh with many hops, or a VPN.
add("long-cable", "20 ms to one node: not a home network", "network.latency", inject=lambda lab, node: relayed(lab, node, 0.010))
add(
    "far-node", "120 ms to one node: it is in another place", "network.controller", "network.latency",
    inject=lambda lab, node: relayed(lab, node, 0.060),
)  # fmt: skip


@misconfiguration("two-in-one-subnet", "the node has two interfaces in the same subnet", "network.subnets")
def two_in_one_subnet(lab: Lab, node: str) -> Iterator[None]:
    """As with a cable and Wi-Fi: nobody knows on which one the kernel answers."""
    lab_node = lab.state.node(node)
    port = f"second{lab_node.number}"
    address = f"{lab_node.host.rpartition('.')[0]}.{150 + lab_node.number}/24"
    on_switch(
        lab, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth1", "netns",
        str(network.NAMESPACES / lab_node.network_namespace),
    )  # fmt: skip
    try:
        on_switch(lab, "ip", "link", "set", port, "master", "lan", "up")
        inside(lab, node, "ip", "address", "add", address, "dev", "eth1")
        inside(lab, node, "ip", "link", "set", "eth1", "up")
        yield
    finally:
        on_switch(lab, "ip", "link", "delete", port)


@misconfiguration("behind-nat", "the node is behind a translated address", "network.nat", "network.place")
def behind_nat(lab: Lab, node: str) -> Iterator[None]:
    """As in WSL2, or a virtual machine with its default adapter: it reaches every machine, and only its SSH port is forwarded to it."""
    needs("nft", package="nftables")
    lab_node, switch = lab.state.node(node), network.switch_namespace(lab.state)
    port, router, inner = network.switch_port(lab_node), f"homelab-{lab.state.id}+router", "192.168.77"
    rules = (
        f"table ip {_TABLE} {{\n"
        f"chain come {{\ntype nat hook prerouting priority -100\niifname out tcp dport {lab_node.port} dnat to {inner}.2\n}}\n"
        f"chain leave {{\ntype nat hook postrouting priority 100\noifname out masquerade\n}}\n}}"
    )
    with contextlib.ExitStack() as undo:
        # The router: one leg with the node's address in the switch, the other on a bridge that it shares with the node's port.
        call("ip", "netns", "add", router)
        undo.callback(call, "ip", "netns", "delete", router)
        call("ip", "-n", switch, "link", "add", "behind", "type", "bridge")
        undo.callback(call, "ip", "-n", switch, "link", "delete", "behind")
        undo.callback(call, "ip", "-n", switch, "link", "set", port, "master", "lan")
        for outer, leg, bridge in (("natout", "out", "lan"), ("natin", "in", "behind")):
            call("ip", "-n", switch, "link", "add", outer, "type", "veth", "peer", "name", leg, "netns", router)
            undo.callback(call, "ip", "-n", switch, "link", "delete", outer)
            call("ip", "-n", switch, "link", "set", outer, "master", bridge, "up")
        call("ip", "-n", switch, "link", "set", "behind", "up")
        call("ip", "-n", switch, "link", "set", port, "master", "behind")
        _move(lab, node, f"{lab_node.host}/24", f"{inner}.2/24")
        undo.callback(_move, lab, node, f"{inner}.2/24", f"{lab_node.host}/24")
        inside(lab, node, "ip", "route", "add", "default", "via", f"{inner}.1")
        undo.callback(inside, lab, node, "ip", "route", "delete", "default")
        for leg, address in (("out", f"{lab_node.host}/24"), ("in", f"{inner}.1/24")):
            call("ip", "-n", router, "address", "add", address, "dev", leg)
            call("ip", "-n", router, "link", "set", leg, "up")
        in_router = ("nsenter", f"--net={network.NAMESPACES / router}")
        try:
            call(*in_router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            call(*in_router, "nft", rules)
        except HomelabError as error:
            raise NotInjectable(error.message, where="the router", hint="is the kernel built with nft's nat?") from error
        _forget_neighbours(lab)
        undo.callback(_forget_neighbours, lab)
        undo.enter_context(cluster_says(lab, node, lan_address=None, interface=None))
        yield


def _move(lab: Lab, node: str, before: str, after: str) -> None:
    inside(lab, node, "ip", "address", "delete", before, "dev", INTERFACE)
    inside(lab, node, "ip", "address", "add", after, "dev", INTERFACE)


def _forget_neighbours(lab: Lab) -> None:
    """An address has moved to another machine: every machine asks for it again."""
    call("ip", "neigh", "flush", "dev", network.uplink(lab.state.id))
    for node in lab.nodes:
        inside(lab, node.name, "ip", "neigh", "flush", "dev", INTERFACE)
