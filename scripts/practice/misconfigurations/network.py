"""A misconfigured network of a node: its firewall, its interfaces, its own name, and a stranger on the rendezvous port."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs
from homelab.lab.lab import Lab
from homelab.lab.network import INTERFACE
from homelab.lab.tools import call
from scripts.practice.misconfigurations.misconfiguration import Inject, NotInjectable, add, misconfiguration, peer_of
from scripts.practice.misconfigurations.node_changes import (
    cluster_says,
    covered,
    edited,
    enter,
    inside,
    layered,
    needs,
    running,
    says,
    view,
)

PORT = 29500
# What Linux hands out by default (net.ipv4.ip_local_port_range); gloo, NCCL and torchrun listen on such ports.
EPHEMERAL = "32768-60999"
STALE_RUN = "2026-01-05-2011-forgotten"
_TABLE = "homelab_fault"


@contextlib.contextmanager
def firewall(lab: Lab, node: str, hook: str, *rules: str) -> Iterator[None]:
    """A table of nft with `rules` in the hook "input" or "output" of the node."""
    needs("nft", package="nftables")
    chain = "\n".join([f"type filter hook {hook} priority 0; policy accept", *rules])
    try:
        inside(lab, node, "nft", f"table inet {_TABLE} {{\nchain fault {{\n{chain}\n}}\n}}")
    except HomelabError as error:
        raise NotInjectable(error.message, where=node, hint="is the kernel built with nftables?") from error
    try:
        yield
    finally:
        inside(lab, node, "nft", "delete", "table", "inet", _TABLE)


def _behind(hook: str, rule: str) -> Inject:
    """A firewall with this rule; PEER in it is the address of the node after this one."""

    def inject(lab: Lab, node: str) -> AbstractContextManager[None]:
        peer = lab.state.node(peer_of(lab, node)).host if "PEER" in rule else ""
        return firewall(lab, node, hook, rule.replace("PEER", peer))

    return inject


_NEW = f"tcp dport {EPHEMERAL} ct state new"
add("ephemeral-in", "a firewall drops incoming connections to ephemeral ports", "network.reach", inject=_behind("input", f"{_NEW} drop"))
add("ephemeral-out", "a firewall drops outgoing connections to ephemeral ports", "network.reach", inject=_behind("output", f"{_NEW} drop"))
# With this, torchrun by itself hangs for fifteen minutes without a message.
add(
    "rendezvous-blocked", "a firewall drops port 29500 on the head", "network.reach", "network.port",
    inject=_behind("input", f"tcp dport {PORT} drop"), where="head",
)  # fmt: skip
# As firewalld does it: the answer is "administratively prohibited".
add(
    "reject", "a firewall rejects connections to ephemeral ports instead of dropping them", "network.reach",
    inject=_behind("input", f"{_NEW} reject with icmpx admin-prohibited"),
)  # fmt: skip
# Looks like a port on which no program listens.
add("reset", "a firewall resets connections to ephemeral ports", "network.reach", inject=_behind("input", f"{_NEW} reject with tcp reset"))
# A range that was opened for another program: some connections come through, most do not.
add(
    "some-ephemeral", "a firewall opens only a few ephemeral ports", "network.reach",
    inject=_behind("input", "tcp dport 33000-60999 ct state new drop"),
)  # fmt: skip
# Both can be reached from the controller and from every other node.
add(
    "pair-cut", "two nodes cannot talk to each other over TCP", "network.reach",
    inject=_behind("input", "ip saddr PEER meta l4proto tcp drop"), where="pair",
)  # fmt: skip
add(
    "pair-one-way",
    "one node cannot connect to one other",
    "network.reach",
    inject=_behind("output", f"ip daddr PEER {_NEW} drop"),
    where="pair",
)
# The other node has no firewall at all.
add(
    "reject-out-pair", "the node's own firewall rejects its connections to one other node", "network.reach",
    inject=_behind("output", "ip daddr PEER tcp dport != 22 ct state new reject with tcp reset"),
)  # fmt: skip
add(
    "reject-out-all", "the node's own firewall rejects outgoing connections to ephemeral ports", "network.reach",
    inject=_behind("output", f"{_NEW} reject with icmpx admin-prohibited"),
)  # fmt: skip
# Of two ports that are tried, both are open in one try of four.
add(
    "half-ephemeral", "a firewall closes half of the ephemeral ports", "network.reach",
    inject=_behind("input", "tcp dport 32768-46883 ct state new drop"),
)  # fmt: skip


@misconfiguration("docker0", "cluster.toml names docker0 as the node's interface", "network.virtual", "network.place", "network.reach")
def docker0(lab: Lab, node: str) -> Iterator[None]:
    """Its address exists on every machine with Docker, and no other machine reaches it."""
    with bridge(lab, node, "docker0", "172.17.0.1/16"), cluster_says(lab, node, interface='"docker0"', lan_address=None):
        yield


@contextlib.contextmanager
def bridge(lab: Lab, node: str, name: str, address: str) -> Iterator[None]:
    """A bridge with an address and one cable in it, as container programs make them. It is harmless by itself."""
    for words in (
        ("link", "add", name, "type", "bridge"),
        ("link", "add", "veth0", "type", "veth", "peer", "name", "veth1"),
        ("link", "set", "veth0", "master", name, "up"),
        ("link", "set", "veth1", "up"),
        ("address", "add", address, "dev", name),
        ("link", "set", name, "up"),
    ):
        inside(lab, node, "ip", *words)
    try:
        yield
    finally:
        inside(lab, node, "ip", "link", "delete", "veth0")
        inside(lab, node, "ip", "link", "delete", name)


@misconfiguration("own-name-loopback", "the node's own name means 127.0.1.1 on itself", "network.name")
def own_name_loopback(lab: Lab, node: str) -> Iterator[None]:
    """What the installer of Debian and Ubuntu writes."""
    file = lab.state.node_folder(lab.state.node(node)) / "etc" / "hosts"
    with edited(file, lambda text: f"127.0.1.1\t{node}\n{text}"):
        yield


@contextlib.contextmanager
def _listener(lab: Lab, node: str, **environment: str) -> Iterator[None]:
    """A web server on the rendezvous port of the node."""
    with running(lab, node, sys.executable, "-I", "-m", "http.server", str(PORT), environment=environment):
        listening = f":{PORT:04X} 00000000:0000 0A"
        command = [*enter(lab, node), "cat", "/proc/net/tcp"]
        if not procfs.until(lambda: listening in call(*command), 10.0):
            raise HomelabError(f"no program listens on port {PORT} of {node}", where=node, hint="try again")
        yield


def _of_a_run(node: str) -> dict[str, str]:
    """The environment that marks a process as one of a forgotten run."""
    return {"HOMELAB_RUN": STALE_RUN, "HOMELAB_NODE": node}


add("stranger-on-port", "another program listens on port 29500 of the head", "network.port", inject=_listener, where="head")
add(
    "stale-run-on-port", "a forgotten run listens on port 29500 of the head", "network.port", "runs.alive",
    inject=lambda lab, node: _listener(lab, node, **_of_a_run(node)), where="head",
)  # fmt: skip
add(
    "stale-run", "a forgotten run is alive on a node, without a port", "runs.alive",
    inject=lambda lab, node: running(lab, node, "sleep", "600", environment=_of_a_run(node)),
)  # fmt: skip


@misconfiguration("wrong-address", "cluster.toml has a lan_address that the node does not have", "network.place")
def wrong_address(lab: Lab, node: str) -> Iterator[None]:
    """As after the router has given the node another address."""
    other = lab.state.node(node).host.rpartition(".")[0] + ".199"
    with cluster_says(lab, node, lan_address=f'"{other}"', interface=None):
        yield


add(
    "wrong-interface", "cluster.toml names an interface that the node does not have", "network.place",
    inject=says(interface='"enp7s0"', lan_address=None),
)  # fmt: skip


@misconfiguration("wifi", "the node is on Wi-Fi", "network.wifi")
def wifi(lab: Lab, node: str) -> Iterator[None]:
    """The kernel shows a wireless interface by a folder `wireless` beside its other properties."""
    folder = f"/sys/class/net/{INTERFACE}/wireless"
    with _device_folder(lab, node, "wireless"):
        assert inside(lab, node, "ls", "-d", folder)
        yield


@contextlib.contextmanager
def _device_folder(lab: Lab, node: str, name: str) -> Iterator[None]:
    device = inside(lab, node, "readlink", "-f", f"/sys/class/net/{INTERFACE}").strip()
    with layered(lab, node, device) as folder:
        (folder / name).mkdir()
        yield


@misconfiguration("slow-socket", "the cable came up at 100 Mbit/s", "network.speed")
def slow_socket(lab: Lab, node: str) -> Iterator[None]:
    """With one broken wire of eight both ends agree on less; the kernel shows it in a file."""
    device = inside(lab, node, "readlink", "-f", f"/sys/class/net/{INTERFACE}").strip()
    assert view(lab, node, f"{device}/speed").exists()
    with covered(lab, node, f"{device}/speed", "100\n"):
        yield
