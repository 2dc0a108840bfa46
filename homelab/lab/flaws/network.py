"""Flaws of a node's network: its firewall, its interfaces, its own name, and who sits on the rendezvous port."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from homelab.errors import HomelabError
from homelab.lab import procfs
from homelab.lab.flaws.flaw import NotInjectable, flaw, peer_of
from homelab.lab.flaws.inside import cluster_says, covered, edited, enter, inside, layered, needs, running, view
from homelab.lab.lab import Lab
from homelab.lab.network import INTERFACE
from homelab.lab.tools import call

PORT = 29500
# What Linux hands out by default (net.ipv4.ip_local_port_range); gloo, NCCL and torchrun listen on such ports.
EPHEMERAL = "32768-60999"
STALE_RUN = "2026-01-05-2011-forgotten"
_TABLE = "homelab_flaw"


@contextlib.contextmanager
def firewall(lab: Lab, node: str, hook: str, *rules: str) -> Iterator[None]:
    """A table of nft with `rules` in the hook "input" or "output" of the node."""
    needs("nft", package="nftables")
    chain = "\n".join([f"type filter hook {hook} priority 0; policy accept", *rules])
    try:
        inside(lab, node, "nft", f"table inet {_TABLE} {{\nchain flaw {{\n{chain}\n}}\n}}")
    except HomelabError as error:
        raise NotInjectable(error.message, where=node, hint="is the kernel built with nftables?") from error
    try:
        yield
    finally:
        inside(lab, node, "nft", "delete", "table", "inet", _TABLE)


@flaw("ephemeral-in", "a firewall drops what comes in to ephemeral ports", "network.reach")
def ephemeral_in(lab: Lab, node: str) -> Iterator[None]:
    """The default of many a firewall: ssh is open, all else is dropped without a word."""
    with firewall(lab, node, "input", f"tcp dport {EPHEMERAL} ct state new drop"):
        yield


@flaw("ephemeral-out", "a firewall drops what goes out to ephemeral ports", "network.reach")
def ephemeral_out(lab: Lab, node: str) -> Iterator[None]:
    """The other direction alone: everybody reaches the node, it reaches nobody."""
    with firewall(lab, node, "output", f"tcp dport {EPHEMERAL} ct state new drop"):
        yield


@flaw("rendezvous-blocked", "a firewall drops port 29500 on the head", "network.reach", "network.port", place="head")
def rendezvous_blocked(lab: Lab, node: str) -> Iterator[None]:
    """Plain torchrun hangs for fifteen minutes with this, without a message."""
    with firewall(lab, node, "input", f"tcp dport {PORT} drop"):
        yield


@flaw("reject", "a firewall rejects ephemeral ports instead of dropping them", "network.reach")
def reject(lab: Lab, node: str) -> Iterator[None]:
    """As firewalld does it: the answer is "administratively prohibited"."""
    with firewall(lab, node, "input", f"tcp dport {EPHEMERAL} ct state new reject with icmpx admin-prohibited"):
        yield


@flaw("reset", "a firewall resets connections to ephemeral ports", "network.reach")
def reset(lab: Lab, node: str) -> Iterator[None]:
    """Looks like a port on which nobody listens."""
    with firewall(lab, node, "input", f"tcp dport {EPHEMERAL} ct state new reject with tcp reset"):
        yield


@flaw("some-ephemeral", "a firewall lets in only a few ephemeral ports", "network.reach")
def some_ephemeral(lab: Lab, node: str) -> Iterator[None]:
    """A range that was opened for another program: some connections come through, most never do."""
    with firewall(lab, node, "input", "tcp dport 33000-60999 ct state new drop"):
        yield


@flaw("pair-cut", "two nodes hear nothing of each other over TCP", "network.reach", pair=True)
def pair_cut(lab: Lab, node: str) -> Iterator[None]:
    """Both can be reached from here and from every other node."""
    peer = lab.state.node(peer_of(lab, node)).host
    with firewall(lab, node, "input", f"ip saddr {peer} meta l4proto tcp drop"):
        yield


@flaw("pair-one-way", "one node cannot connect to one other", "network.reach", pair=True)
def pair_one_way(lab: Lab, node: str) -> Iterator[None]:
    """Only in this direction, only between these two."""
    peer = lab.state.node(peer_of(lab, node)).host
    with firewall(lab, node, "output", f"ip daddr {peer} tcp dport {EPHEMERAL} ct state new drop"):
        yield


@flaw("reject-out-pair", "a node's own firewall rejects what goes to one other", "network.reach")
def reject_out_pair(lab: Lab, node: str) -> Iterator[None]:
    """The other node has no firewall at all."""
    peer = lab.state.node(peer_of(lab, node)).host
    with firewall(lab, node, "output", f"ip daddr {peer} tcp dport != 22 ct state new reject with tcp reset"):
        yield


@flaw("reject-out-all", "a node's own firewall rejects all that goes out to ephemeral ports", "network.reach")
def reject_out_all(lab: Lab, node: str) -> Iterator[None]:
    """What is opened must be the way out, not the way in."""
    with firewall(lab, node, "output", f"tcp dport {EPHEMERAL} ct state new reject with icmpx admin-prohibited"):
        yield


@flaw("half-ephemeral", "a firewall closes half of the ephemeral ports", "network.reach")
def half_ephemeral(lab: Lab, node: str) -> Iterator[None]:
    """Of two ports that are tried, both are open in one look of four."""
    with firewall(lab, node, "input", "tcp dport 32768-46883 ct state new drop"):
        yield


@flaw(
    "docker0", "cluster.toml names docker0 as the node's interface", "network.virtual", "network.place", "network.reach"
)
def docker0(lab: Lab, node: str) -> Iterator[None]:
    """An address that exists on every machine with Docker, and leads nowhere from any other."""
    with (
        bridge(lab, node, "docker0", "172.17.0.1/16"),
        cluster_says(lab, node, interface='"docker0"', lan_address=None),
    ):
        yield


@contextlib.contextmanager
def bridge(lab: Lab, node: str, name: str, address: str) -> Iterator[None]:
    """A bridge with an address and one cable in it, as container programs make them. (Harmless by itself.)"""
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


@flaw("own-name-loopback", "the node's own name means 127.0.1.1 on itself", "network.name")
def own_name_loopback(lab: Lab, node: str) -> Iterator[None]:
    """What the installer of Debian and Ubuntu writes."""
    file = lab.state.node_folder(lab.state.node(node)) / "etc" / "hosts"
    with edited(file, lambda text: f"127.0.1.1\t{node}\n{text}"):
        yield


@flaw("stranger-on-port", "a stranger listens on port 29500 of the head", "network.port", place="head")
def stranger_on_port(lab: Lab, node: str) -> Iterator[None]:
    """Some web server of the house."""
    with running(lab, node, sys.executable, "-I", "-m", "http.server", str(PORT)):
        _wait_for_listener(lab, node)
        yield


@flaw(
    "stale-run-on-port", "a forgotten run listens on port 29500 of the head", "network.port", "runs.alive", place="head"
)
def stale_run_on_port(lab: Lab, node: str) -> Iterator[None]:
    """Its processes carry the run's name in their environment, as those of every run do."""
    environment = {"HOMELAB_RUN": STALE_RUN, "HOMELAB_NODE": node}
    with running(lab, node, sys.executable, "-I", "-m", "http.server", str(PORT), environment=environment):
        _wait_for_listener(lab, node)
        yield


@flaw("stale-run", "a forgotten run is alive on a node", "runs.alive")
def stale_run(lab: Lab, node: str) -> Iterator[None]:
    """It holds memory and time, and no port."""
    environment = {"HOMELAB_RUN": STALE_RUN, "HOMELAB_NODE": node}
    with running(lab, node, "sleep", "600", environment=environment):
        yield


def _wait_for_listener(lab: Lab, node: str) -> None:
    listening = f":{PORT:04X} 00000000:0000 0A"
    command = [*enter(lab, node), "cat", "/proc/net/tcp"]
    if not procfs.until(lambda: listening in call(*command), 10.0):
        raise HomelabError(f"nobody listens on port {PORT} of {node}", where=node, hint="try again")


@flaw("wrong-address", "cluster.toml has a lan_address that the node does not have", "network.place")
def wrong_address(lab: Lab, node: str) -> Iterator[None]:
    """After the router gave it another one, for instance."""
    other = lab.state.node(node).host.rpartition(".")[0] + ".199"
    with cluster_says(lab, node, lan_address=f'"{other}"', interface=None):
        yield


@flaw("wrong-interface", "cluster.toml names an interface that the node does not have", "network.place")
def wrong_interface(lab: Lab, node: str) -> Iterator[None]:
    """Interfaces are renamed when a card moves to another slot."""
    with cluster_says(lab, node, interface='"enp7s0"', lan_address=None):
        yield


@flaw("wifi", "the node is on Wi-Fi", "network.wifi")
def wifi(lab: Lab, node: str) -> Iterator[None]:
    """What the kernel says of a wireless interface: a folder `wireless` beside its other properties."""
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


@flaw("slow-socket", "the cable came up at 100 Mbit/s", "network.speed")
def slow_socket(lab: Lab, node: str) -> Iterator[None]:
    """One of eight wires is broken: both ends agree on less. The kernel says so in a file."""
    device = inside(lab, node, "readlink", "-f", f"/sys/class/net/{INTERFACE}").strip()
    assert view(lab, node, f"{device}/speed").exists()
    with covered(lab, node, f"{device}/speed", "100\n"):
        yield
