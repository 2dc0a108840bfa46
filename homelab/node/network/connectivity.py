"""The dials between nodes: who reaches whom before torchrun hangs on it, how quickly, and with how many bytes per second.

One process per node does it all: it listens, and does what the lines on its stdin ask for.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING

from homelab.node.network import packet_loss, path_mtu, throughput
from homelab.node.network.listener import GREETING, Listener
from homelab.shared.protocol import message
from homelab.shared.protocol.network_messages import Dial, Dials, Listening

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.network_messages import MeetRequest

_ANSWER_S = 6.0  # for a listener that is slow: the connection exists, so no packet was dropped
_TCP_INFO = struct.Struct("=8B24I")  # linux/tcp.h: the round trip of the handshake, as the kernel saw it
_RTT, _TOTAL_RETRANSMITS = 8 + 15, 8 + 23


def meet(request: MeetRequest) -> None:
    """Listen on `address` (and `port` where given) for `seconds` at most, and answer each line of stdin with one of stdout.

    First line out: {"ports": [...], "rendezvous": port or null, "udp": port or null, "burst": port or null, "error"}. Lines in:
    {"dial": [target, ...], "timeout_s", "packets"} (see `dial`; each target with "burst" is sent so many small packets, too),
    {"burst": [target, ...], "packets"} (these alone), {"counted": {token: packets}} (see `homelab.node.network.packet_loss`), and
    {"send": [target, ...], "bytes", "seconds"} (see `homelab.node.network.throughput.send_all`). Ends with stdin.
    """
    listener = Listener(request.address, request.port)
    _say(
        Listening(ports=tuple(listener.ports), rendezvous=listener.rendezvous, udp=listener.udp, burst=listener.burst, error=listener.error)
    )
    limit = threading.Timer(request.seconds, os._exit, (0,))
    limit.daemon = True
    limit.start()
    links: list[Dial]
    for line in iter(sys.stdin.buffer.readline, b""):
        order = json.loads(line)
        if "dial" in order:
            links = dial(order["dial"], float(order.get("timeout_s", 2.0)))
            path_mtu.probe(order["dial"], links)
            _burst(order["dial"], order, links)
        elif "burst" in order:
            links = [Dial(node=target["node"], address=target["address"], port=0) for target in order["burst"]]
            _burst(order["burst"], order, links)
        elif "counted" in order:
            _say(listener.counter.counted(order["counted"]))
            continue
        else:
            links = throughput.send_all(order["send"], int(order["bytes"]), float(order["seconds"]))
        _say(Dials(links=tuple(links)))
    limit.cancel()


def _burst(targets: list[JsonObject], order: JsonObject, links: list[Dial]) -> None:
    """Sets "sent" in the first link of each target that was sent packets to be counted."""
    for target, sent in zip(targets, packet_loss.send(targets, int(order.get("packets", 0)))):
        first = next((place for place, link in enumerate(links) if link.node == target["node"]), None)
        if sent is not None and first is not None:
            links[first] = links[first].replace(sent=sent)


def _say(answer: Listening | Dials) -> None:
    sys.stdout.write(json.dumps(answer, default=message.fields) + "\n")
    sys.stdout.flush()


def dial(targets: list[JsonObject], timeout_s: float) -> list[Dial]:
    """Connect to all ports of all targets at once: [{"node", "address", "ports": {port: how often}}].

    Answers one for each port, with latency_ms (the best), median_ms and worst_ms, and "repeats":
    how many packets of these handshakes had to be sent again.
    """
    attempts = [_Attempts(target, int(port), int(count)) for target in targets for port, count in target["ports"].items()]
    with selectors.DefaultSelector() as selector:
        waiting = set()
        for attempt in attempts:
            if attempt.start(selector, timeout_s):
                waiting.add(attempt)
        while waiting:
            first = min(attempt.deadline for attempt in waiting)
            events = selector.select(max(0.0, first - time.monotonic()))
            for key, _ in events:
                attempt = key.data
                if not attempt.advance(selector, timeout_s):
                    waiting.discard(attempt)
            # Only when nothing was waiting for us: a process that got no CPU must not look like a firewall.
            for attempt in [late for late in waiting if not events and late.deadline <= time.monotonic()]:
                attempt.give_up(selector, timeout_s)
                waiting.discard(attempt)
    return [attempt.answer() for attempt in attempts]


class _Attempts:
    """The connects to one port, one after another."""

    def __init__(self, target: JsonObject, port: int, count: int) -> None:
        self.target, self.port, self.left = target, port, count
        self.samples_ms: list[float] = []
        self.repeats, self.deadline = 0, 0.0
        self.error: str | None = None
        self._socket: socket.socket  # of the connect that is under way
        self._started, self._is_connected = 0.0, False

    def start(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        """Begin the next connect. False when there is none to wait for."""
        self.left -= 1
        self._is_connected = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._started = time.perf_counter()
        self.deadline = time.monotonic() + timeout_s
        code = self._socket.connect_ex((self.target["address"], self.port))
        if code not in (0, errno.EINPROGRESS):
            self._fail(os.strerror(code))
            return False
        selector.register(self._socket, selectors.EVENT_WRITE, self)
        return True

    def advance(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        """Continue: the socket is ready. False when this port is done."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            selector.unregister(self._socket)
            self._fail(os.strerror(code))
            return False
        if not self._is_connected:
            self._is_connected = True
            self.samples_ms.append(_latency_ms(self._socket, self._started))
            info = _tcp_info(self._socket)
            self.repeats += info[_TOTAL_RETRANSMITS] if info else 0
            self.deadline = time.monotonic() + _ANSWER_S
            selector.modify(self._socket, selectors.EVENT_READ, self)
            return True
        selector.unregister(self._socket)
        try:
            answered = self._socket.recv(1)
        except OSError as failure:
            self._fail(failure.strerror or str(failure))
            return False
        self._socket.close()
        if answered != GREETING:
            self.error = "another program answered on this port"
            return False
        return self.left > 0 and self.start(selector, timeout_s)

    def give_up(self, selector: selectors.BaseSelector, timeout_s: float) -> None:
        """End the test of this port: the time is over."""
        selector.unregister(self._socket)
        if self._is_connected:
            self._fail(f"it connected, but no byte came back within {_ANSWER_S:.0f} s")
        else:
            self._fail(f"no answer within {timeout_s:.0f} s (a firewall that drops packets looks like this)")

    def _fail(self, error: str) -> None:
        self.error = error
        self._socket.close()

    def answer(self) -> Dial:
        """As `dial` says."""
        samples_ms = sorted(self.samples_ms)
        return Dial(
            node=self.target["node"],
            address=self.target["address"],
            port=self.port,
            error=self.error,
            repeats=self.repeats,
            latency_ms=samples_ms[0] if samples_ms else None,
            median_ms=samples_ms[len(samples_ms) // 2] if samples_ms else None,
            worst_ms=samples_ms[-1] if samples_ms else None,
        )


def _latency_ms(connection: socket.socket, started: float) -> float:
    """Latency of the handshake, measured by the kernel, which answers while processes wait for a CPU. Measured by the clock where a packet was lost."""
    by_clock = round((time.perf_counter() - started) * 1000, 3)
    info = _tcp_info(connection)
    if info is None or info[_TOTAL_RETRANSMITS] or not info[_RTT]:
        return by_clock
    return min(by_clock, round(float(info[_RTT]) / 1000.0, 3))


def _tcp_info(connection: socket.socket) -> tuple[Any, ...] | None:
    try:
        return _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, AttributeError, struct.error):
        return None
