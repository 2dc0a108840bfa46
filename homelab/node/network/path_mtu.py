"""Whether packets of full size arrive: a VPN, a bridge or a switch with a smaller MTU lets connections open, and then swallows gradients."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

from homelab.node.network.listener import PROBE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.network_messages import Dial

_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never fragment, and ignore the MTU that the kernel has cached
_HEADER_BYTES = 28  # IPv4 and UDP
_SMALL_BYTES = 100
_ROUNDS_S = (0.1, 0.2, 0.4)  # how long each round waits at most; it ends when all have answered
_BETWEEN_S = 0.25
_SIZES = (9000, 8000, 4000, 1500, 1492, 1480, 1472, 1450, 1440, 1420, 1400, 1380, 1350, 1300, 1280, 1000, 576)
# Only the loopback device of practice nodes carries larger packets; no wire does.
_LARGEST_BYTES = 9216


def probe(targets: list[JsonObject], links: list[Dial]) -> None:
    """Sets carried_bytes and lost_bytes (of whole IP packets) in the first link of each target that has "udp" and "packet_bytes".

    Neither is set where even small probes are not answered: UDP is blocked, and nothing is known.
    """
    full_sizes = {}
    for number, target in enumerate(targets):
        size = int(target.get("packet_bytes") or 0)
        if target.get("udp") and _SMALL_BYTES < size <= _LARGEST_BYTES:
            full_sizes[number] = size
    if not full_sizes:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as prober:
        try:
            prober.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        except OSError:  # it would be fragmented and arrive, and the probe would show nothing
            return
        prober.setblocking(False)
        for number, (carried, lost) in _look(prober, targets, full_sizes).items():
            first = next((place for place, link in enumerate(links) if link.node == targets[number]["node"]), None)
            if first is not None:
                links[first] = links[first].replace(carried_bytes=carried, lost_bytes=lost)


def _look(prober: socket.socket, targets: list[JsonObject], full_sizes: Any) -> Any:
    """{number of target: (largest size that arrived, size that never did or None)}, without those that answer nothing."""
    token = os.urandom(8)
    rounds_of_small = dict.fromkeys(full_sizes, 0)
    arrived: dict[Any, Any] = {}
    for limit_s in _ROUNDS_S:
        left = [number for number in full_sizes if arrived.get(number) != full_sizes[number]]
        if not left:
            break
        sent = [(number, size) for number in left for size in (_SMALL_BYTES, full_sizes[number])]
        for number, size in _exchange(prober, token, targets, sent, limit_s):
            if size == _SMALL_BYTES:
                rounds_of_small[number] += 1
            arrived[number] = max(size, arrived.get(number, 0))
    answers = {number: (size, None) for number, size in arrived.items() if size == full_sizes[number]}
    # Small probes were answered every time, full-size probes never.
    lost = [number for number in arrived if number not in answers and rounds_of_small[number] >= 2]
    for _ in range(2 if lost else 0):
        between = [(number, size) for number in lost for size in _SIZES if size < full_sizes[number]]
        for number, size in _exchange(prober, token, targets, between, _BETWEEN_S):
            arrived[number] = max(size, arrived[number])
    answers.update({number: (arrived[number], full_sizes[number]) for number in lost})
    return answers


def _exchange(prober: socket.socket, token: bytes, targets: list[JsonObject], sent: Any, limit_s: float) -> Iterator[Any]:
    """Send these (number, size), and yield those that are answered in time, each once."""
    missing = set(sent)
    for number, size in sent:
        packet = PROBE.pack(token, number, size).ljust(size - _HEADER_BYTES, b"\0")
        try:
            prober.sendto(packet, (targets[number]["address"], int(targets[number]["udp"])))
        except OSError:  # larger than the MTU of this interface, refused, or no route: counts as lost
            continue
    deadline = time.monotonic() + limit_s
    while missing:
        # Read once more after the deadline: packets that arrived while this process had no CPU count.
        ready, _, _ = select.select([prober], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        try:
            answer = prober.recv(100)
        except OSError:
            continue
        if len(answer) == PROBE.size:
            echoed_token, number, size = PROBE.unpack(answer)
            if echoed_token == token and (number, size) in missing:
                missing.discard((number, size))
                yield number, size
