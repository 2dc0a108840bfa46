"""The dials between nodes: who reaches whom before torchrun hangs on it, how quickly, and with how many bytes per second.

One process per node does it all: it listens, and does what the lines on its stdin ask for.
"""

import errno
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time

from homelab.node import bursts, packets, wire
from homelab.node.listener import GREETING, Listener

_ANSWER_S = 6.0  # for a listener that is there and slow: the connection stands, so no packet was dropped
_TCP_INFO = struct.Struct("=8B24I")  # linux/tcp.h: the round trip of the handshake, as the kernel saw it
_RTT, _TOTAL_RETRANSMITS = 8 + 15, 8 + 23


def meet(request):
    """Listen on `address` (and `port` where given) for `seconds` at most, and answer each line of stdin with one of stdout.

    First line out: {"ports": [...], "rendezvous": port or null, "udp": port or null, "burst": port or null, "error"}. Lines in:
    {"dial": [target, ...], "timeout_s", "packets"} (see `dial`; each target with "burst" is sent so many small packets, too),
    {"burst": [target, ...], "packets"} (these alone), {"counted": {token: packets}} (see `homelab.node.bursts`), and
    {"send": [target, ...], "bytes", "seconds"} (see `homelab.node.wire.send_all`). Ends with stdin.
    """
    here = Listener(request["address"], request.get("port") and int(request["port"]))
    _say({"ports": here.ports, "rendezvous": here.rendezvous, "udp": here.udp, "burst": here.burst, "error": here.error})
    limit = threading.Timer(float(request.get("seconds", 60)), os._exit, (0,))
    limit.daemon = True
    limit.start()
    for line in iter(sys.stdin.buffer.readline, b""):
        asked = json.loads(line)
        if "dial" in asked:
            links = dial(asked["dial"], float(asked.get("timeout_s", 2.0)))
            packets.probe(asked["dial"], links)
            _burst(asked["dial"], asked, links)
        elif "burst" in asked:
            links = [{"node": target["node"], "address": target["address"], "port": 0} for target in asked["burst"]]
            _burst(asked["burst"], asked, links)
        elif "counted" in asked:
            _say(here.counter.counted(asked["counted"]))
            continue
        else:
            links = wire.send_all(asked["send"], int(asked["bytes"]), float(asked["seconds"]))
        _say({"links": links})
    limit.cancel()


def _burst(targets, asked, links):
    """Adds "sent" to the first link of each target that was sent packets to be counted."""
    for target, sent in zip(targets, bursts.send(targets, int(asked.get("packets", 0)))):
        link = next((entry for entry in links if entry["node"] == target["node"]), None)
        if sent is not None and link is not None:
            link["sent"] = sent


def _say(answer):
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def dial(targets, timeout_s):
    """Connect to all ports of all targets at once: [{"node", "address", "ports": {port: how often}}].

    Answers {"node", "address", "port", "error"} for each port, with latency_ms (the best), median_ms and worst_ms, and "repeats":
    how many packets of these handshakes had to be sent again.
    """
    attempts = [
        _Attempts(target, int(port), int(count)) for target in targets for port, count in target["ports"].items()
    ]
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

    def __init__(self, target, port, count):
        self.target, self.port, self.left = target, port, count
        self.samples_ms, self.repeats, self.error, self.deadline = [], 0, None, 0.0
        self._socket, self._started, self._is_connected = None, 0.0, False

    def start(self, selector, timeout_s):
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

    def advance(self, selector, timeout_s):
        """What the socket has waited for is there. False when this port is done."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            selector.unregister(self._socket)
            self._fail(os.strerror(code))
            return False
        if not self._is_connected:
            self._is_connected = True
            self.samples_ms.append(_latency_ms(self._socket, self._started))
            self.repeats += _repeats(self._socket)
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
            self.error = "something else answered on this port"
            return False
        return self.left > 0 and self.start(selector, timeout_s)

    def give_up(self, selector, timeout_s):
        """The time is over."""
        selector.unregister(self._socket)
        if self._is_connected:
            self._fail("it connected, and no byte came back within %.0f s" % _ANSWER_S)
        else:
            self._fail("no answer within %.0f s (a firewall that drops packets looks like this)" % timeout_s)

    def _fail(self, error):
        self.error = error
        self._socket.close()

    def answer(self):
        """As `dial` says."""
        answer = {
            "node": self.target["node"],
            "address": self.target["address"],
            "port": self.port,
            "error": self.error,
            "repeats": self.repeats,
        }
        if self.samples_ms:
            answer["latency_ms"] = min(self.samples_ms)
            answer["median_ms"] = sorted(self.samples_ms)[len(self.samples_ms) // 2]
            answer["worst_ms"] = max(self.samples_ms)
        return answer


def _latency_ms(connection, started):
    """Of the handshake, as the kernel saw it: it answers while processes wait for a CPU. By the clock where a packet was lost."""
    by_clock = round((time.perf_counter() - started) * 1000, 3)
    info = _tcp_info(connection)
    if info is None or info[_TOTAL_RETRANSMITS] or not info[_RTT]:
        return by_clock
    return min(by_clock, round(info[_RTT] / 1000.0, 3))


def _repeats(connection):
    info = _tcp_info(connection)
    return info[_TOTAL_RETRANSMITS] if info else 0


def _tcp_info(connection):
    try:
        return _TCP_INFO.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, AttributeError, struct.error):
        return None
