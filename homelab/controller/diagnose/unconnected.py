"""Ranks that could not connect to one and the same node: its firewall or its network is the cause, also when other ranks are silent meanwhile.

Only a rank's last words count: that a connection could not be made is also a warning, which is printed while a peer still starts. The
texts are those of gloo (tcp/pair.cc), of c10d's store (TCPStore's socket.cpp) and of NCCL (misc/socket.cc).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.config.cluster import Node
from homelab.controller.diagnose.traces import child_failures, last_exceptions
from homelab.controller.run.state import node_part
from homelab.shared.protocol.rank_messages import RankReply
from homelab.shared.protocol.run_messages import Reply

_SAID = (
    # Gloo connectFullMesh failed with [.../pair.cc:152] timed out connecting: SO_ERROR: Connection timed out, remote=[10.0.0.1]:62896$1
    # (The number is no port that anybody listened on: in torch 2.13 its bytes are in the wrong order.)
    re.compile(r"(?:connectFullMesh failed|connecting\b|SO_ERROR).*?\bremote=\[(?P<address>[^\]\s]+)\](?P<port>)", re.IGNORECASE),
    # The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).
    re.compile(r"connect to \((?P<address>[^,()\s]+), (?P<port>\d+)\)", re.IGNORECASE),
    # The client socket has failed to connect to [10.0.0.1]:29500 (errno: 110 - Connection timed out).
    re.compile(r"connect(?: to)? \[(?P<address>[^\]\s]+)\]:(?P<port>\d+)", re.IGNORECASE),
)
# socketPollConnect: Connect to 10.0.0.1<43211> returned 110(Connection timed out); ... failed : No route to host
_NCCL_SAID = re.compile(r"connect(?: to)? (?P<address>[^\s<>]+)<(?P<port>\d+)> (?:returned|failed)", re.IGNORECASE)
_NCCL = re.compile(r"nccl\w*Error|DistBackendError|NCCL error", re.IGNORECASE)
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Accusation:
    """One rank (None: torchrun itself) that could not connect to an address, in its own words. `time_s`: when its node's part ended."""

    node: str
    rank: int | None
    address: str
    port: str
    text: str
    time_s: float | None


@dataclass(frozen=True)
class Unconnected:
    """`node`, at `target` (its address, with the ports where they are few), to which the others could not connect."""

    node: str
    target: str
    accusations: tuple[Accusation, ...]


def find(replies: Mapping[str, Reply], attempt: int, nodes: Mapping[str, Node]) -> Unconnected | None:
    """The node that two others, or all others, could not connect to; None where nobody or several are named so.

    `nodes`, by name: whose addresses they are. A node that was stopped says nothing: its peers were ended, too.
    """
    owners = {address: node.name for node in nodes.values() for address in _addresses(node)}
    accusers: dict[str, list[Accusation]] = {}
    taking_part = {name for name, reply in replies.items() if reply.run is not None and reply.run.attempt == attempt}
    for accusation in (one for name in sorted(taking_part) for one in _of_node(name, replies[name])):
        accused = owners.get(accusation.address)
        if accused is not None and accused != accusation.node:
            accusers.setdefault(accused, []).append(accusation)
    by_nodes = {accused: {one.node for one in accusations} for accused, accusations in accusers.items()}
    most = max(map(len, by_nodes.values()), default=0)
    blamed = [accused for accused, accusations in by_nodes.items() if len(accusations) == most]
    if len(blamed) != 1:
        return None
    (accused,) = blamed
    if most < 2 and by_nodes[accused] != taking_part - {accused}:
        return None  # one of several: it may as well be its own network
    accusations = accusers[accused]
    ports = list(dict.fromkeys(one.port for one in accusations if one.port))
    address = accusations[0].address
    host = f"[{address}]" if ":" in address else address
    target = f"{host}:{ports[0]}" if len(ports) == 1 else address
    if 1 < len(ports) <= _MOST_SHOWN:
        target += f", ports {' and '.join(ports)}"
    return Unconnected(accused, target, tuple(accusations))


def _addresses(node: Node) -> Iterator[str]:
    for text in (node.lan_address, node.host):
        if text and (plain := _plain(text)):
            yield plain


def _plain(text: str) -> str:
    """One spelling of an address, without a zone ("%eth0") and without the IPv6 that an IPv4 was put in; "" where it is none."""
    try:
        address = ipaddress.ip_address(text.strip().partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(address, "ipv4_mapped", None) or address)


def _of_node(name: str, reply: Reply) -> Iterator[Accusation]:
    run = reply.run
    assert run is not None
    if node_part(run, run.attempt) == "stopped":
        return
    ended_at = run.exit.ended_at if run.exit else None
    times = {failure.rank: failure.time_s for failure in child_failures(run.torchrun_tail, ended_at)}
    has_said = False
    for rank, rank_reply in sorted(run.ranks.items()):
        if match := _first(_last_words(rank_reply)):
            has_said = True
            yield Accusation(name, rank, *match, times.get(rank) or ended_at)
    if not has_said and run.exit is not None and (match := _first([raised.text for raised in last_exceptions(run.torchrun_tail)])):
        yield Accusation(name, None, *match, ended_at)


def _last_words(rank_reply: RankReply) -> list[str]:
    words = (
        [rank_reply.error.message]
        if rank_reply.error is not None
        else [raised.text for raised in last_exceptions(rank_reply.log_tail.stderr)]
    )
    if any(_NCCL.search(text) for text in words):  # the address is in the line that NCCL itself printed
        words += [line for line in (*rank_reply.log_tail.stderr, *rank_reply.log_tail.stdout) if "NCCL WARN" in line]
    return words


def _first(texts: Sequence[str]) -> tuple[str, str, str] | None:
    """(address, port or "", the line) of the first connection that was not made."""
    for line in (line for text in texts for line in text.splitlines()):
        for pattern in (*_SAID, _NCCL_SAID):
            hit = pattern.search(line)
            if hit and (address := _plain(hit["address"])):
                return address, hit["port"] or "", line.strip()
    return None
