"""Bytes per second to another node, as it counts them."""

import json
import select
import socket
import struct
import time

from homelab.node.listener import GREETING, READY

_BLOCK = memoryview(bytes(1 << 18))
_SEND_BUFFER_BYTES = 1 << 20  # more than 10 Gbit/s holds in flight on a LAN, and little to wait for on a slow link
_STALLED_S = 3.0  # so long in all for those that take no bytes
_TIMEOUT_S = 3.0


def send_all(targets, limit_bytes, limit_s):
    """Send so much to one target after another, for so long at most: [{"node", "address", "port"}].

    Answers each with throughput_bytes_per_s, or "stalled": connections open, and no bytes arrive, twice. Neither where no time
    was left to find out.
    """
    answers = [dict(target, error=None) for target in targets]
    stalled_s = _STALLED_S
    for answer in answers:
        problem = None
        for _ in range(2):
            started = time.monotonic()
            if stalled_s <= 0:
                break
            try:
                answer["throughput_bytes_per_s"] = _send(answer, limit_bytes, limit_s)
                break
            except socket.timeout:
                problem = "bytes that are sent are not taken within %.0f s" % _TIMEOUT_S
            except (OSError, ValueError, KeyError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            stalled_s -= time.monotonic() - started
        else:
            answer["stalled"] = problem
    return answers


def _send(answer, limit_bytes, limit_s):
    """Bytes per second as the other side counted them. Raises socket.timeout or ValueError when they do not arrive."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection.settimeout(_TIMEOUT_S)
        connection.connect((answer["address"], int(answer["port"])))
        if connection.recv(1) != GREETING:
            raise ValueError("something else answered on this port")
        connection.sendall(json.dumps({"bytes": limit_bytes, "seconds": limit_s}).encode())
        connection.settimeout(_TIMEOUT_S + 10 * limit_s)  # others may be measured before it is our turn
        if connection.recv(1) != READY:
            raise ValueError("it does not count bytes")
        counted = json.loads(_pour(connection, limit_bytes, _TIMEOUT_S + limit_s))
        # Drops what still waits in the buffer: on a slow link that would be seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if counted["bytes"] <= 0 or counted["seconds"] <= 0:
        raise ValueError("bytes that are sent do not arrive")
    return counted["bytes"] / counted["seconds"]


def _pour(connection, limit_bytes, limit_s):
    """Send until the other side says how much it has got."""
    connection.setblocking(False)
    sent, deadline = 0, time.monotonic() + limit_s
    while True:
        more = [connection] if sent < limit_bytes else []
        readable, writable, _ = select.select([connection], more, [], max(0.0, deadline - time.monotonic()))
        if readable:
            answered = connection.recv(500)
            if not answered:
                raise ValueError("it closed the connection while bytes were sent")
            return answered
        if not writable:
            raise socket.timeout
        try:
            sent += connection.send(_BLOCK)
        except BlockingIOError:
            continue
