"""Bursts of small packets, counted where they arrive: how many are lost on the way, and in which direction."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from homelab.shared.protocol.network_messages import Dials

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_PROBE = struct.Struct("!8sH")  # token of the burst, number of the packet
_PAYLOAD_BYTES = 72  # of an IP packet of 100 bytes: homelab.node.network.path_mtu tests losses that depend on the size
_BATCH, _PAUSE_S = 15, 0.01  # a quarter of a Mbit/s per hundred packets: no wire is filled by it
_LONGEST_S = 2.0
_QUIET_S = 0.15  # no packet arrives later than this after the last one, even on a long wire
_RECEIVE_BYTES = 4 << 20  # a process without CPU time for a second must not look like a bad cable
_SO_RCVBUFFORCE, _SO_MEMINFO, _DROPS = 33, 55, 8  # asm-generic/socket.h, linux/sock_diag.h
_MOST_BURSTS = 1000


def send(targets: list[JsonObject], count: int) -> list[int | None]:
    """Send `count` packets to each target with "burst" {"port", "token"}: [how many went out, or None], in the order of targets."""
    sent: list[int | None] = [None] * len(targets)
    bursts = {number: target["burst"] for number, target in enumerate(targets) if (target.get("burst") or {}).get("port")}
    if not bursts:
        return sent
    deadline = time.monotonic() + _LONGEST_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for first in range(0, count, _BATCH):
            for number, burst in bursts.items():
                place = (targets[number]["address"], int(burst["port"]))
                count_sent = sent[number] or 0
                for packet in range(first, min(first + _BATCH, count)):
                    try:
                        sender.sendto(_PROBE.pack(bytes.fromhex(burst["token"]), packet).ljust(_PAYLOAD_BYTES, b"\0"), place)
                        count_sent += 1
                    except OSError:  # this node itself refused or dropped it: that is not a loss on the way
                        continue
                sent[number] = count_sent
            if time.monotonic() > deadline:
                break
            select.select([], [], [], _PAUSE_S)  # sleep(3) fails under libfaketime 0.9.10, by which practice nodes have a wrong clock
    return sent


class Counter:
    """Counts what arrives on one UDP socket."""

    def __init__(self, receiver: socket.socket) -> None:
        self.receiver = receiver
        self._seen: dict[Any, Any] = {}
        self._dropped, self._lock = 0, threading.Lock()
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):  # the first for root alone
            try:
                receiver.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BYTES)
                break
            except OSError:
                continue

    def take(self, _: Any = None) -> Any:
        """Read every packet that has arrived. True when there was one."""
        received = False
        with self._lock:
            while True:
                try:
                    data = self.receiver.recv(_PAYLOAD_BYTES)
                except OSError:
                    return received
                received = True
                if len(data) == _PAYLOAD_BYTES:
                    token, packet = _PROBE.unpack_from(data)
                    if token in self._seen or len(self._seen) < _MOST_BURSTS:
                        self._seen.setdefault(token, set()).add(packet)

    def counted(self, expected: JsonObject) -> Dials:
        """How many packets arrived. `expected`: {token: packets that were sent}."""
        quiet = time.monotonic() + _QUIET_S
        while time.monotonic() < quiet or select.select([self.receiver], [], [], 0)[0]:
            if self.take():
                quiet = time.monotonic() + _QUIET_S
            counted = {token: len(self._seen.get(bytes.fromhex(token), ())) for token in expected}
            if all(counted[token] >= expected[token] for token in expected):
                break
            select.select([self.receiver], [], [], 0.02)
        before, self._dropped = self._dropped, _drops(self.receiver)
        return Dials(links=(), counted=counted, dropped=self._dropped - before)


def _drops(receiver: socket.socket) -> int:
    """Packets that this socket had no room for, since it was opened; 0 where the kernel does not say."""
    try:
        numbers = receiver.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * (_DROPS + 1))
        return int(struct.unpack(f"={len(numbers) // 4}I", numbers)[_DROPS])
    except (OSError, struct.error, IndexError):
        return 0
