"""Whether this node still reaches the other nodes of its run; asked while its ranks make no progress, because a peer may be gone.

A connection to a port without a listener is enough: the kernel of a running machine refuses it. Behind a firewall that drops the
packets no answer ever comes, so only a peer that has answered before can count as missing.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from homelab.shared.protocol.rank_messages import RankStatus

# RFC 863, discard: nothing listens there today, and no range of ephemeral ports holds it.
_PORT = 9
_EVERY_S = 1.0
_TIMEOUT_S = 1.5  # the kernel repeats a lost packet after 1 s
_THERE = frozenset({0, errno.ECONNREFUSED})


class Missed:
    """Which peers have answered, and since when each does not answer any more. Every time is monotonic."""

    def __init__(self) -> None:
        self._since: dict[str, float | None] = {}  # name -> since when it has not answered, None while it does

    def dialled(self, began_s: float, names: Collection[str], answered: Collection[str]) -> None:
        """Of `names`, dialled at `began_s`, these have answered."""
        for name in names:
            if name in answered:
                self._since[name] = None
            elif name in self._since and self._since[name] is None:
                self._since[name] = began_s

    def forgive(self) -> None:
        """Forget missed answers: a step was done, and a step needs every node."""
        self._since = dict.fromkeys(self._since)

    def seconds(self, now_s: float) -> dict[str, float]:
        """{name: for how long it has not answered} of those who ever did."""
        return {name: 0.0 if since is None else round(now_s - since, 2) for name, since in sorted(self._since.items())}


class Peers:
    """Dials from a thread of its own while it is awake. `addresses`: {name: IPv4 address} of the other nodes."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._addresses = addresses
        self._missed = Missed()
        self._lock = threading.Lock()
        self._awake = threading.Event()
        self._steps = 0
        threading.Thread(target=self._run, daemon=True, name="peers").start()

    def look(self, ranks: Mapping[int, RankStatus], now_s: float) -> dict[str, float]:
        """Dial while no step is done by `ranks` (as a sign has them); what `Missed.seconds` says."""
        # (A pass proves nothing about other nodes: it needs none of them.)
        is_stepping = bool(ranks) and all(
            rank.phase == "training" and rank.step and rank.step_still_s < _EVERY_S for rank in ranks.values()
        )
        with self._lock:
            if is_stepping:
                self._awake.clear()
                self._steps += 1
                self._missed.forgive()
            else:
                self._awake.set()
            return self._missed.seconds(now_s)

    def _run(self) -> None:
        while self._addresses:
            self._awake.wait()
            began_s, steps = time.monotonic(), self._steps
            answered = reached(self._addresses, _TIMEOUT_S)
            with self._lock:
                if steps == self._steps:  # otherwise a step was done meanwhile
                    self._missed.dialled(began_s, self._addresses, answered)
            time.sleep(max(0.0, began_s + _EVERY_S - time.monotonic()))


def reached(addresses: dict[str, str], timeout_s: float) -> set[str]:
    """The names of {name: IPv4 address} behind which a machine answers within `timeout_s`; a refusal is an answer, too."""
    answered: set[str] = set()
    connections: dict[str, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for name, address in addresses.items():
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            code = _connect(connection, address)
            if code == errno.EINPROGRESS:
                connections[name] = connection
                selector.register(connection, selectors.EVENT_WRITE, name)
                continue
            connection.close()
            if code in _THERE:
                answered.add(name)
        deadline_s = time.monotonic() + timeout_s
        while selector.get_map():
            events = selector.select(max(0.0, deadline_s - time.monotonic()))
            for key, _ in events:
                if connections[key.data].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _THERE:
                    answered.add(key.data)
            # Only when nothing was waiting for us: a process that got no CPU must not look like a machine that is gone.
            over = [] if events or time.monotonic() < deadline_s else list(selector.get_map().values())
            for key in [key for key, _ in events] + over:
                selector.unregister(key.fileobj)
                connections[key.data].close()
    return answered


def _connect(connection: socket.socket, address: str) -> int | None:
    try:
        return connection.connect_ex((address, _PORT))
    except OSError as error:  # no address at all
        return error.errno
