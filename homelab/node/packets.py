"""Whether packets of full size arrive: a VPN, a bridge or a switch with a smaller MTU lets connections open, and then swallows gradients."""

import os
import select
import socket
import time

from homelab.node.listener import PROBE

_IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: never fragment, and do not believe what was learnt before
_HEADER_BYTES = 28  # IPv4 and UDP
_SMALL_BYTES = 100
_ROUNDS_S = (0.1, 0.2, 0.4)  # how long each round waits at most; it ends when all have answered
_BETWEEN_S = 0.25
_SIZES = (9000, 8000, 4000, 1500, 1492, 1480, 1472, 1450, 1440, 1420, 1400, 1380, 1350, 1300, 1280, 1000, 576)
# What is larger never crosses a wire: the loopback device of practice nodes.
_LARGEST_BYTES = 9216


def probe(targets, links):
    """Adds carried_bytes and lost_bytes (of whole IP packets) to the first link of each target that has "udp" and "packet_bytes".

    Neither is added where even small probes are not answered: UDP is blocked, and nothing is known.
    """
    wanted = {}
    for number, target in enumerate(targets):
        size = int(target.get("packet_bytes") or 0)
        if target.get("udp") and _SMALL_BYTES < size <= _LARGEST_BYTES:
            wanted[number] = size
    if not wanted:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as prober:
        try:
            prober.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        except OSError:  # it would be fragmented, and arrive: nothing could be learnt
            return
        prober.setblocking(False)
        for number, (carried, lost) in _look(prober, targets, wanted).items():
            link = next((entry for entry in links if entry["node"] == targets[number]["node"]), None)
            if link is not None:
                link["carried_bytes"] = carried
                if lost:
                    link["lost_bytes"] = lost


def _look(prober, targets, wanted):
    """{number of target: (largest size that arrived, size that never did or None)}, without those that answer nothing."""
    token = os.urandom(8)
    rounds_of_small = dict.fromkeys(wanted, 0)
    arrived = {}
    for limit_s in _ROUNDS_S:
        left = [number for number in wanted if arrived.get(number) != wanted[number]]
        if not left:
            break
        sent = [(number, size) for number in left for size in (_SMALL_BYTES, wanted[number])]
        for number, size in _exchange(prober, token, targets, sent, limit_s):
            if size == _SMALL_BYTES:
                rounds_of_small[number] += 1
            arrived[number] = max(size, arrived.get(number, 0))
    found = {number: (size, None) for number, size in arrived.items() if size == wanted[number]}
    # Small ones were answered again and again, full ones never.
    lost = [number for number in arrived if number not in found and rounds_of_small[number] >= 2]
    for _ in range(2 if lost else 0):
        between = [(number, size) for number in lost for size in _SIZES if size < wanted[number]]
        for number, size in _exchange(prober, token, targets, between, _BETWEEN_S):
            arrived[number] = max(size, arrived[number])
    found.update({number: (arrived[number], wanted[number]) for number in lost})
    return found


def _exchange(prober, token, targets, sent, limit_s):
    """Send these (number, size), and yield those that are answered in time, each once."""
    missing = set(sent)
    for number, size in sent:
        packet = PROBE.pack(token, number, size).ljust(size - _HEADER_BYTES, b"\0")
        try:
            prober.sendto(packet, (targets[number]["address"], int(targets[number]["udp"])))
        except OSError:  # larger than the own interface's MTU, refused, or no route: as if it were lost
            continue
    deadline = time.monotonic() + limit_s
    while missing:
        # Looked at once more after the deadline: what has come while this process had no CPU counts.
        ready, _, _ = select.select([prober], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        try:
            answer = prober.recv(100)
        except OSError:
            continue
        if len(answer) == PROBE.size:
            theirs, number, size = PROBE.unpack(answer)
            if theirs == token and (number, size) in missing:
                missing.discard((number, size))
                yield number, size
