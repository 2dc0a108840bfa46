"""The dials between nodes: who reaches whom before torchrun hangs on it, how quickly, and with how many bytes per second."""

import json
import socket
import struct
import sys
import threading
import time

_BLOCK = bytes(1 << 18)
_SEND_BUFFER_BYTES = 1 << 20  # more than 10 Gbit/s holds in flight on a LAN, and little to wait for on a slow link
_SLOW_BYTES_PER_S = 50e6  # what is slower than this is measured again: a busy CPU must not look like a slow wire


def listen(request):
    """Listen on the node's LAN address: on the given port where asked (`port`), and on two ephemeral ones.

    Prints one JSON line {"ports": [...], "rendezvous": port or null, "error"} when ready, then answers every connection with
    one byte, and counts what is sent to it after that, until stdin closes or `seconds` have passed.
    """
    sockets, ports, rendezvous, error = [], [], None, None
    for port in [int(request["port"])] if request.get("port") else []:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((request["address"], port))
            listener.listen(64)
            sockets.append(listener)
            rendezvous = port
        except OSError as failure:
            error = failure.strerror
    for _ in range(2):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((request["address"], 0))
        except OSError as failure:
            error = failure.strerror
            continue
        listener.listen(64)
        sockets.append(listener)
        ports.append(listener.getsockname()[1])
    one_at_a_time = threading.Lock()

    def serve(listener):
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_answer, args=(connection, one_at_a_time), daemon=True).start()

    for listener in sockets:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
    print(json.dumps({"ports": ports, "rendezvous": rendezvous, "error": error}), flush=True)
    ended = threading.Event()

    def wait_for_end():
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    ended.wait(float(request.get("seconds", 30)))


def _answer(connection, one_at_a_time):
    """One byte for whoever connects. Who then sends {"bytes", "seconds"} in a line wants to be measured: see `_count`."""
    with connection:
        try:
            connection.settimeout(5.0)
            connection.sendall(b"!")
            asked = connection.recv(200)
            if not asked:
                return
            limits = json.loads(asked)
            # Two senders at once would each get half of this node's wire.
            with one_at_a_time:
                connection.sendall(b">")
                answer = _count(connection, int(limits["bytes"]), float(limits["seconds"]))
            connection.sendall(json.dumps(answer).encode())
            # Closed with bytes unread, the connection would be reset, and the answer lost with it.
            buffer = bytearray(1 << 20)
            while connection.recv_into(buffer):
                pass
        except (OSError, ValueError, KeyError, TypeError):
            return


def _count(connection, limit_bytes, limit_s):
    """Bytes received and the seconds they took. Counted here and not where they are sent: a sender's buffers take them at once.

    The clock starts with the first bytes, which are not counted, and stops at the limit of bytes or of time.
    """
    buffer = bytearray(1 << 20)
    first = connection.recv_into(buffer)
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


def dial(request):
    """Connect to every target at once. `targets`: [{"node", "address", "port"}]; answers latency_ms or error for each.

    With `send_bytes` and `send_s`, instead: send so much to one target after another, for so long at most, and answer
    throughput_bytes_per_s as the target counted it, or error.
    """
    timeout_s = float(request.get("timeout_s", 2.0))
    answers = [dict(target) for target in request["targets"]]
    if request.get("send_bytes"):
        for answer in answers:
            _throughput(answer, int(request["send_bytes"]), float(request["send_s"]), timeout_s)
        return {"links": answers}

    def one(answer):
        try:
            answer["error"] = connect(answer)
            # The fastest of three: a busy CPU on either side must not look like a slow wire.
            for _ in range(2):
                connect(answer)
        except socket.timeout:
            answer["error"] = "no answer within %.0f s (a firewall that drops packets looks like this)" % timeout_s
        except OSError as error:
            answer["error"] = error.strerror or str(error)

    def connect(answer):
        started = time.perf_counter()
        with socket.create_connection((answer["address"], int(answer["port"])), timeout=timeout_s) as connection:
            latency_ms = round((time.perf_counter() - started) * 1000, 3)
            answer["latency_ms"] = min(latency_ms, answer.get("latency_ms", latency_ms))
            connection.settimeout(timeout_s)
            return None if connection.recv(1) == b"!" else "something else answered on this port"

    threads = [threading.Thread(target=one, args=(answer,), daemon=True) for answer in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(6 * timeout_s + 1)
    return {"links": answers}


def _throughput(answer, limit_bytes, limit_s, timeout_s):
    """Adds throughput_bytes_per_s (the better of two where the first was slow) or error."""
    answer["error"] = None
    best = 0.0
    try:
        for _ in range(2):
            best = max(best, _send(answer, limit_bytes, limit_s, timeout_s))
            if best >= _SLOW_BYTES_PER_S:
                break
    except socket.timeout:
        answer["error"] = "it did not take bytes within %.0f s" % timeout_s
    except (OSError, ValueError, KeyError) as error:
        answer["error"] = str(error)
    if best > 0:
        answer["throughput_bytes_per_s"] = best


def _send(answer, limit_bytes, limit_s, timeout_s):
    """Bytes per second as the other side counted them."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        connection.settimeout(timeout_s)
        connection.connect((answer["address"], int(answer["port"])))
        if connection.recv(1) != b"!":
            raise ValueError("something else answered on this port")
        connection.sendall(json.dumps({"bytes": limit_bytes, "seconds": limit_s}).encode())
        if connection.recv(1) != b">":
            raise ValueError("it does not count bytes")
        sender = threading.Thread(target=_pour, args=(connection, limit_bytes), daemon=True)
        sender.start()
        connection.settimeout(timeout_s + limit_s)
        answered = connection.recv(500)
        # Ends the sender at once, and drops what still waits in its buffer: on a slow link that would be seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        sender.join(timeout_s)
        counted = json.loads(answered)
        return counted["bytes"] / counted["seconds"] if counted["seconds"] > 0 else 0.0


def _pour(connection, limit_bytes):
    sent = 0
    try:
        while sent < limit_bytes:
            sent += connection.send(_BLOCK)
    except OSError:  # the other side has counted enough
        return
