"""How far the transfer to each node is, as one line for all nodes: several threads send at once."""

from __future__ import annotations

import threading
import time

from homelab.controller.base.say import Say
from homelab.controller.features.setup.transfer_state import TransferState, line_of

_INTERVAL_S = 2.0  # where output is not a terminal, each is a line


class TransferProgress:
    """Collects what the senders report, and says it every two seconds."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._nodes: dict[str, TransferState] = {}
        self._said_s = 0.0
        self.installing: set[str] = set()
        """Nodes that install now. They go on if this process ends: half an installation helps nobody."""

    def begin(self, node: str, total_bytes: int) -> None:
        """So many bytes go to this node."""
        with self._lock:
            self._nodes[node] = TransferState(total_bytes=total_bytes, began_s=time.monotonic())
            self._tell()

    def add(self, node: str, count_bytes: int) -> None:
        """The node has so many bytes more; fewer where a file begins anew."""
        with self._lock:
            self._nodes[node] = self._nodes[node].with_more(count_bytes)
            if time.monotonic() - self._said_s >= _INTERVAL_S:
                self._tell()

    def end(self, node: str, next_work: str) -> None:
        """The node has everything, and does `next_work` now."""
        with self._lock:
            self._nodes[node] = self._nodes[node].done(next_work)
            self._tell()

    def _tell(self) -> None:
        self._said_s = time.monotonic()
        self._say(line_of(self._nodes, self._said_s))
