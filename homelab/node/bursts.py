"""Bursts of small packets, counted where they arrive: how many are lost on the way, and in which direction."""

import select
import socket
import struct
import threading
import time

_PROBE = struct.Struct("!8sH")  # token of the burst, number of the packet
_PAYLOAD_BYTES = 72  # of an IP packet of 100 bytes: what is lost by its size is another matter (homelab.node.packets)
_BATCH, _PAUSE_S = 15, 0.01  # a quarter of a Mbit/s per hundred packets: no wire is filled by it
_LONGEST_S = 2.0
_QUIET_S = 0.15  # so long after the last packet nothing more comes, also on a long wire
_RECEIVE_BYTES = 4 << 20  # a process that gets no CPU for a second must not look like a bad cable
_SO_RCVBUFFORCE, _SO_MEMINFO, _DROPS = 33, 55, 8  # asm-generic/socket.h, linux/sock_diag.h
_MOST_BURSTS = 1000


def send(targets, count):
    """Send `count` packets to each target with "burst" {"port", "token"}: [how many went out, or None], in the order of targets."""
    sent = [None] * len(targets)
    wanted = {number: target["burst"] for number, target in enumerate(targets) if (target.get("burst") or {}).get("port")}
    if not wanted:
        return sent
    deadline = time.monotonic() + _LONGEST_S
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for first in range(0, count, _BATCH):
            for number, burst in wanted.items():
                place = (targets[number]["address"], int(burst["port"]))
                sent[number] = sent[number] or 0
                for packet in range(first, min(first + _BATCH, count)):
                    try:
                        sender.sendto(_PROBE.pack(bytes.fromhex(burst["token"]), packet).ljust(_PAYLOAD_BYTES, b"\0"), place)
                        sent[number] += 1
                    except OSError:  # refused or dropped by this node itself: that is no loss on the way
                        continue
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_S)
    return sent


class Counter:
    """Counts what arrives on one UDP socket."""

    def __init__(self, receiver):
        self.receiver = receiver
        self._seen, self._dropped, self._lock = {}, 0, threading.Lock()
        for option in (_SO_RCVBUFFORCE, socket.SO_RCVBUF):  # the first for root alone
            try:
                receiver.setsockopt(socket.SOL_SOCKET, option, _RECEIVE_BYTES)
                break
            except OSError:
                continue

    def take(self, _=None):
        """Everything that has come. True when that was anything."""
        found = False
        with self._lock:
            while True:
                try:
                    data = self.receiver.recv(_PAYLOAD_BYTES)
                except OSError:
                    return found
                found = True
                if len(data) == _PAYLOAD_BYTES:
                    token, packet = _PROBE.unpack_from(data)
                    if token in self._seen or len(self._seen) < _MOST_BURSTS:
                        self._seen.setdefault(token, set()).add(packet)

    def counted(self, wanted):
        """{"counted": {token: packets}, "dropped": by this socket since last asked}; `wanted` {token: packets that were sent}."""
        quiet = time.monotonic() + _QUIET_S
        while time.monotonic() < quiet or select.select([self.receiver], [], [], 0)[0]:
            if self.take():
                quiet = time.monotonic() + _QUIET_S
            counted = {token: len(self._seen.get(bytes.fromhex(token), ())) for token in wanted}
            if all(counted[token] >= wanted[token] for token in wanted):
                break
            select.select([self.receiver], [], [], 0.02)
        before, self._dropped = self._dropped, _drops(self.receiver)
        return {"links": [], "counted": counted, "dropped": self._dropped - before}


def _drops(receiver):
    """Packets that this socket had no room for, since it was opened; 0 where the kernel does not say."""
    try:
        numbers = receiver.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 4 * (_DROPS + 1))
        return struct.unpack("=%dI" % (len(numbers) // 4), numbers)[_DROPS]
    except (OSError, struct.error, IndexError):
        return 0
