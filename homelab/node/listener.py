"""The listening half of the dials: answers everybody who connects with one byte, counts what is sent, and echoes probes."""

import json
import selectors
import socket
import struct
import threading
import time

from homelab.node.bursts import Counter

GREETING = b"!"  # "connected"
READY = b">"  # "now send, I count"
_FIRST_BYTES_S = 0.7  # TCP repeats a lost segment after 0.2 and 0.6 s: who has nothing then gets nothing
PORTS = 8  # of two, a firewall that closes a part of the ephemeral ports is met by luck
PROBE = struct.Struct("!8sHH")  # token of the prober, number of the target, bytes of the whole IP packet


class Listener:
    """TCP on `port` where given and on eight ephemeral ports, UDP on one that echoes and one that counts; served by one thread, and one more per measurement."""

    def __init__(self, address, port=None):
        self.ports, self.rendezvous, self.udp, self.burst, self.error = [], None, None, None, None
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

    def _bind(self, kind, address, port):
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

    def _serve(self):
        while True:
            for key, _ in self._selector.select():
                try:
                    key.data(key.fileobj)
                except OSError:  # whoever connected has gone
                    continue

    def _accept(self, listener):
        connection, _ = listener.accept()
        connection.setblocking(False)
        connection.send(GREETING)
        self._selector.register(connection, selectors.EVENT_READ, self._asked)

    def _asked(self, connection):
        """Who sends {"bytes", "seconds"} in a line wants to be measured; everybody else closes."""
        try:
            asked = connection.recv(200)
        except OSError:
            asked = b""
        self._selector.unregister(connection)
        if asked:
            threading.Thread(target=self._measure, args=(connection, asked), daemon=True).start()
        else:
            connection.close()

    def _measure(self, connection, asked):
        with connection:
            try:
                limits = json.loads(asked)
                connection.settimeout(5.0)
                # Two senders at once would each get half of this node's wire.
                with self._one_at_a_time:
                    connection.sendall(READY)
                    answer = _count(connection, int(limits["bytes"]), float(limits["seconds"]))
                connection.sendall(json.dumps(answer).encode())
                # Closed with bytes unread, the connection would be reset, and the answer lost with it.
                buffer = bytearray(1 << 20)
                while connection.recv_into(buffer):
                    pass
            except (OSError, ValueError, KeyError, TypeError):
                return


def _echo(echo):
    """A small answer to a probe of any size, so that only one direction is tried."""
    data, sender = echo.recvfrom(1 << 16)
    if len(data) >= PROBE.size:
        echo.sendto(data[: PROBE.size], sender)


def _count(connection, limit_bytes, limit_s):
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
            got = connection.recv_into(buffer)
        except socket.timeout:
            break
        if not got:
            break
        count += got
        last = time.perf_counter()
    connection.settimeout(2.0)
    return {"bytes": count, "seconds": max(last, time.perf_counter()) - started}
