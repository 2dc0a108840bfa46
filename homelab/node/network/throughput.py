"""Bytes per second to another node, as it counts them."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from typing import TYPE_CHECKING

from homelab.node.network.listener import GREETING, READY
from homelab.shared.protocol.network_messages import Dial

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

_BLOCK = memoryview(bytes(1 << 18))
_SEND_BUFFER_BYTES = 1 << 20  # more than 10 Gbit/s has in flight on a LAN, and a slow link sends it in a short time
_STALLED_S = 3.0  # total time for targets that take no bytes
_TIMEOUT_S = 3.0


def send_all(targets: list[JsonObject], limit_bytes: int, limit_s: float) -> list[Dial]:
    """Send a number of bytes to one target after another, within a time limit: [{"node", "address", "port"}].

    Answers each with throughput_bytes_per_s, or "stalled": connections open, and no bytes arrive, twice. Neither where no time
    was left to find out.
    """
    answers = []
    stalled_s = _STALLED_S
    for target in targets:
        problem = stalled = rate = None
        for _ in range(2):
            started = time.monotonic()
            if stalled_s <= 0:
                break
            try:
                rate = _send(target, limit_bytes, limit_s)
                break
            except socket.timeout:
                problem = f"the other node did not accept bytes within {_TIMEOUT_S:.0f} s"
            except (OSError, ValueError, KeyError) as error:
                problem = getattr(error, "strerror", None) or str(error)
            stalled_s -= time.monotonic() - started
        else:
            stalled = problem
        answers.append(
            Dial(node=target["node"], address=target["address"], port=int(target["port"]), throughput_bytes_per_s=rate, stalled=stalled)
        )
    return answers


def _send(target: JsonObject, limit_bytes: int, limit_s: float) -> float:
    """Bytes per second as the other side counted them. Raises socket.timeout or ValueError when they do not arrive."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection.settimeout(_TIMEOUT_S)
        connection.connect((target["address"], int(target["port"])))
        if connection.recv(1) != GREETING:
            raise ValueError("another program answered on this port")
        connection.sendall(json.dumps({"bytes": limit_bytes, "seconds": limit_s}).encode())
        connection.settimeout(_TIMEOUT_S + 10 * limit_s)  # the peer may measure other nodes first
        if connection.recv(1) != READY:
            raise ValueError("it did not count the bytes")
        counted = json.loads(_pour(connection, limit_bytes, _TIMEOUT_S + limit_s))
        # Drops the bytes in the buffer: a slow link would need seconds to send them.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if counted["bytes"] <= 0 or counted["seconds"] <= 0:
        raise ValueError("bytes that are sent do not arrive")
    return float(counted["bytes"] / counted["seconds"])


def _pour(connection: socket.socket, limit_bytes: int, limit_s: float) -> bytes:
    """Send until the other side answers how much it received."""
    connection.setblocking(False)
    sent_bytes, deadline = 0, time.monotonic() + limit_s
    while True:
        more = [connection] if sent_bytes < limit_bytes else []
        readable, writable, _ = select.select([connection], more, [], max(0.0, deadline - time.monotonic()))
        if readable:
            answered = connection.recv(500)
            if not answered:
                raise ValueError("it closed the connection while bytes were sent")
            return answered
        if not writable:
            raise socket.timeout
        try:
            sent_bytes += connection.send(_BLOCK)
        except BlockingIOError:
            continue
