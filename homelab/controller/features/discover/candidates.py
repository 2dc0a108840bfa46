"""Machines that may be nodes: what each source says of them, and which of them are one machine. Pure."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import homelab
from homelab.controller.config.cluster import Node, is_node_name

# Code is kept there, and nobody trains there: their host names, and the user name that all of them share.
_FORGES = (
    "github.com", "ssh.github.com", "gitlab.com", "altssh.gitlab.com", "bitbucket.org", "codeberg.org", "git.sr.ht", "gitea.com",
    "ssh.dev.azure.com", "vs-ssh.visualstudio.com", "hf.co", "huggingface.co", "aur.archlinux.org", "salsa.debian.org",
)  # fmt: skip
_VIRTUAL = (
    "docker", "br-", "veth", "virbr", "lxc", "lxd", "cni", "flannel", "podman", "vmnet", "tailscale", "wg", "zt", "tun", "tap", "nebula",
    "utun", "bridge", "awdl", "llw", "feth",
)  # fmt: skip
_ARP = re.compile(r"^\S+ \((?P<host>[0-9.]+)\) at [0-9a-fA-F]{1,2}(?::[0-9a-fA-F]{1,2}){5} on (?P<device>\S+)")


@dataclass(frozen=True)
class Candidate:
    """A machine that may be a node. `host` is what ssh gets; `name` what the source calls it ("": it gives no name); `user` and `port`: where
    the source names them."""

    host: str
    source: str
    name: str = ""
    user: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Greeting:
    """What the SSH server of a candidate showed before any login. `fingerprint`: of its host key; `address`: where ssh connects to.

    `problem` is why there is no key (empty: there is one).
    """

    candidate: Candidate
    address: str
    port: int
    user: str | None
    fingerprint: str = ""
    problem: str = ""

    @property
    def is_expected(self) -> bool:
        """Whether it is a node unless somebody says no: it was named by a person, and its address is not on the internet."""
        named = self.candidate.source in (ARGUMENT, SSH_CONFIG)
        return named and (self.candidate.source == ARGUMENT or _is_private(self.address))


ARGUMENT, SSH_CONFIG, MDNS, TAILSCALE, NEIGHBOUR, SCAN = "the command line", "~/.ssh/config", "mDNS", "Tailscale", "ip neigh", "--scan"


def from_argument(word: str) -> Candidate:
    """Of `[user@]host[:port]`, where a host is whatever works as `ssh HOST`. Raises InputError."""
    user, _, rest = word.rpartition("@")
    host, colon, port = rest.rpartition(":") if rest.count(":") == 1 else (rest, "", "")
    candidate = Candidate(
        host, ARGUMENT, name="" if is_address(host) else host, user=user or None, port=int(port) if port.isdecimal() else None
    )
    if (colon and candidate.port is None) or not is_usable(candidate):
        raise InputError(
            f"{word!r} names no machine; allowed: [user@]host[:port], if `ssh host` works",
            where="HOST, on the command line",
            hint=homelab("init --help"),
        )
    return candidate


def is_usable(candidate: Candidate) -> bool:
    """Whether cluster.toml can name it."""
    keys = {"host": candidate.host, "user": candidate.user, "port": candidate.port}
    try:
        Node.model_validate({"name": "node", **{key: value for key, value in keys.items() if value is not None}})
    except ValidationError:
        return False
    return candidate.host != "local"


def is_forge(host: str, user: str | None) -> bool:
    """Whether a resolved address is a place for code (GitHub, ...) and no machine."""
    return user == "git" or host.lower() in _FORGES


def from_neighbours(text: str) -> list[Candidate]:
    """Of `ip -j neigh`: the IPv4 addresses that answered lately on a network that is no container's."""
    found = []
    for entry in _objects(text):
        address, device, state = str(entry.get("dst", "")), str(entry.get("dev", "")), entry.get("state") or []
        if is_address(address) and not device.startswith(_VIRTUAL) and not set(state) & {"FAILED", "INCOMPLETE", "NOARP"}:
            found.append(Candidate(address, NEIGHBOUR))
    return sorted(found, key=lambda candidate: ipaddress.IPv4Address(candidate.host))


def from_tailscale(text: str) -> list[Candidate]:
    """Of `tailscale status --json`: the Linux peers that are online, by their tunnel's IPv4 address."""
    try:
        peers = list(json.loads(text)["Peer"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    found = []
    for peer in peers:
        if isinstance(peer, dict) and peer.get("Online") and peer.get("OS") == "linux":
            addresses = [address for address in map(str, peer.get("TailscaleIPs") or []) if is_address(address)]
            found += [Candidate(address, TAILSCALE, name=str(peer.get("HostName", ""))) for address in addresses[:1]]
    return found


def from_arp(text: str) -> list[Candidate]:
    """The same of `arp -an`, as macOS has it: "? (192.168.1.7) at 0:11:22:33:44:55 on en0 ifscope [ethernet]"."""
    found = [
        match
        for line in text.splitlines()
        if (match := _ARP.match(line)) and is_address(match["host"]) and not match["device"].startswith(_VIRTUAL)
    ]
    hosts = {ipaddress.IPv4Address(match["host"]) for match in found}
    return [Candidate(str(host), NEIGHBOUR) for host in sorted(hosts) if not host.is_multicast and not str(host).endswith(".255")]


def networks_around(addresses: Mapping[str, Collection[str]]) -> list[ipaddress.IPv4Network]:
    """The /24 around each address of {interface: its IPv4 addresses}, of those on a cable or Wi-Fi."""
    own = [address for name, ones in addresses.items() if not name.startswith(_VIRTUAL) for address in ones if is_address(address)]
    return list(
        dict.fromkeys(
            ipaddress.IPv4Network(f"{address}/24", strict=False) for address in own if not ipaddress.IPv4Address(address).is_loopback
        )
    )


def own_networks(text: str) -> list[ipaddress.IPv4Network]:
    """Of `ip -j addr`: the /24 around each own address on a cable or Wi-Fi."""
    networks = []
    for entry in _objects(text):
        is_lan = entry.get("link_type") == "ether" and not str(entry.get("ifname", "")).startswith(_VIRTUAL)
        networks += [
            ipaddress.IPv4Network(f"{address['local']}/24", strict=False)
            for address in (entry.get("addr_info") or [] if is_lan else [])
            if address.get("family") == "inet" and is_address(str(address.get("local", "")))
        ]
    return list(dict.fromkeys(networks))


def distinct(candidates: Iterable[Candidate], taken: Collection[tuple[str, int]] = ()) -> list[Candidate]:
    """Each (host, port) once, as the first source has it, and none that is `taken`."""
    first: dict[tuple[str, int], Candidate] = {}
    for candidate in candidates:
        place = (candidate.host, candidate.port or 22)
        if is_usable(candidate) and place not in taken:
            first.setdefault(place, candidate)
    return list(first.values())


def one_each(greetings: Iterable[Greeting]) -> tuple[list[Greeting], dict[str, str]]:
    """(one greeting per machine, {name of another: name that stays}): one host key or one address and port is one machine.

    Those that gave no key stay, unless their address is that of another.
    """
    kept: list[Greeting] = []
    others: dict[str, str] = {}
    places: dict[tuple[str, object], Greeting] = {}
    for greeting in greetings:
        marks: list[tuple[str, object]] = [("place", (greeting.address, greeting.port))]
        marks += [("key", greeting.fingerprint)] if greeting.fingerprint else []
        same = next((places[mark] for mark in marks if mark in places), None)
        if same is None:
            kept.append(greeting)
        else:
            others[greeting.candidate.host] = same.candidate.host
        for mark in marks:
            places.setdefault(mark, same or greeting)
    return kept, others


def moved(remembered: Mapping[str, Collection[str]], greetings: Mapping[str, Greeting]) -> dict[str, str]:
    """{node: candidate}: nodes that do not answer where they were, and whose host key, of those that were accepted there, one candidate shows now."""
    places: dict[str, str] = {}
    for node, fingerprints in remembered.items():
        here = [name for name, greeting in greetings.items() if greeting.fingerprint and greeting.fingerprint in fingerprints]
        if len(here) == 1 and here[0] not in places.values():
            places[node] = here[0]
    return places


def name_for(candidate: Candidate, hostname: str, taken: Collection[str]) -> str:
    """The name of a node: what the source calls it, else the name that it gives itself, else its address; with a number where that is taken."""
    words = [candidate.name, candidate.name.partition(".")[0], hostname.partition(".")[0], candidate.host, "node"]
    base = next(word for word in words if is_node_name(word) and not word.startswith("localhost"))
    numbered = (base if number == 1 else f"{base[:60]}-{number}" for number in range(1, 1000))
    return next(name for name in numbered if name not in taken)


def is_address(text: str) -> bool:
    """Whether it is an IPv4 address (the nodes' rendezvous and probes are IPv4)."""
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_private(address: str) -> bool:
    """Whether an address is of a home, of this machine, or of a tunnel (100.64.0.0/10); names that only the resolver knows count as such."""
    try:
        return not ipaddress.ip_address(address).is_global
    except ValueError:
        return True


def _objects(text: str) -> list[dict[str, Any]]:
    try:
        entries = json.loads(text)
    except ValueError:
        return []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
