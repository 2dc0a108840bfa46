"""The listening half of the dials: answers everybody who connects with one byte, counts what is sent, and echoes probes."""

from __future__ import annotations

import json
import selectors
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

from homelab.node.network.packet_loss import Counter

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

GREETING = b"!"  # "connected"
READY = b">"  # "now send, I count"
_FIRST_BYTES_S = 0.7  # TCP repeats a lost segment after 0.2 and 0.6 s: a peer that has sent nothing by then sends nothing
PORTS = 8  # with two only, a firewall that closes a part of the ephemeral ports could be missed
PROBE = struct.Struct("!8sHH")  # token of the prober, number of the target, bytes of the whole IP packet


class Listener:
    """TCP on `port` where given and on eight ephemeral ports, UDP on one that echoes and one that counts; served by one thread, and one more per measurement."""

    def __init__(self, address: str, port: int | None = None) -> None:
        self.ports, self.rendezvous, self.udp, self.burst = [], None, None, None
        self.error: str | None = None
        self._selector = selectors.DefaultSelector()
        self._one_at_a_time = threading.Lock()
        for number in [*([port] if port else []), *[0] * PORTS]:
            listener = self._bind(socket.SOCK_STREAM, address, number)
            if listener is None:
                continue
            listener.listen(128)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
            if number:
                self.rendezvous = number
            else:
                self.ports.append(listener.getsockname()[1])
        echo = self._bind(socket.SOCK_DGRAM, address, 0)
        if echo is not None:
            self.udp = echo.getsockname()[1]
            self._selector.register(echo, selectors.EVENT_READ, _echo)
        receiver = self._bind(socket.SOCK_DGRAM, address, 0)
        if receiver is not None:
            self.burst = receiver.getsockname()[1]
            self.counter = Counter(receiver)
            self._selector.register(receiver, selectors.EVENT_READ, self.counter.take)
        threading.Thread(target=self._serve, daemon=True).start()

    def _bind(self, kind: int, address: str, port: int) -> socket.socket | None:
        listener = socket.socket(socket.AF_INET, kind)
        try:
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
        except OSError as failure:
            self.error = failure.strerror
            listener.close()
            return None
        listener.setblocking(False)
        return listener

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                try:
                    key.data(key.fileobj)
                except OSError:  # the peer has closed the connection
                    continue

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        connection.send(GREETING)
        self._selector.register(connection, selectors.EVENT_READ, self._asked)

    def _asked(self, connection: socket.socket) -> None:
        """Measure for a peer that sends {"bytes", "seconds"} in a line; every other peer closes."""
        try:
            request = connection.recv(200)
        except OSError:
            request = b""
        self._selector.unregister(connection)
        if request:
            threading.Thread(target=self._measure, args=(connection, request), daemon=True).start()
        else:
            connection.close()

    def _measure(self, connection: socket.socket, request: str) -> None:
        with connection:
            try:
                limits = json.loads(request)
                connection.settimeout(5.0)
                # Two senders at once would each get half of this node's wire.
                with self._one_at_a_time:
                    connection.sendall(READY)
                    answer = _count(connection, int(limits["bytes"]), float(limits["seconds"]))
                connection.sendall(json.dumps(answer).encode())
                # A connection that is closed with unread bytes is reset, and the answer is lost.
                buffer = bytearray(1 << 20)
                while connection.recv_into(buffer):
                    pass
            except (OSError, ValueError, KeyError, TypeError):
                return


def _echo(echo: socket.socket) -> None:
    """A small answer to a probe of any size, so that only one direction is tried."""
    data, sender = echo.recvfrom(1 << 16)
    if len(data) >= PROBE.size:
        echo.sendto(data[: PROBE.size], sender)


def _count(connection: socket.socket, limit_bytes: int, limit_s: float) -> JsonObject:
    """Bytes received and the seconds they took. Counted here and not where they are sent: a sender's buffers take them at once.

    The clock starts with the first bytes, which are not counted, and stops at the limit of bytes or of time. Where none come
    in time, "bytes" is 0.
    """
    buffer = bytearray(1 << 20)
    connection.settimeout(_FIRST_BYTES_S)
    try:
        first = connection.recv_into(buffer)
    except socket.timeout:
        return {"bytes": 0, "seconds": _FIRST_BYTES_S}
    started = last = time.perf_counter()
    count = 0
    while first and count + first < limit_bytes and last - started < limit_s:
        connection.settimeout(max(0.01, started + limit_s - last))
        try:
            received = connection.recv_into(buffer)
        except socket.timeout:
            break
        if not received:
            break
        count += received
        last = time.perf_counter()
    connection.settimeout(2.0)
    return {"bytes": count, "seconds": max(last, time.perf_counter()) - started}
