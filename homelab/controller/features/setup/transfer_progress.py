"""How far the transfer to each node is, as one line for all nodes: several threads send at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from homelab.controller.base.models import Value
from homelab.controller.base.say import Say
from homelab.controller.base.units import decimal_size

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


class TransferState(Value):
    """`sent_bytes` of `total_bytes` since `began_s` (monotonic seconds); `next_work`: what the node does once it has all."""

    total_bytes: int
    began_s: float
    sent_bytes: int = 0
    next_work: str = ""

    def with_more(self, count_bytes: int) -> TransferState:
        """After so many bytes more."""
        return self.model_copy(update={"sent_bytes": self.sent_bytes + count_bytes})

    def done(self, next_work: str) -> TransferState:
        """After the last byte."""
        return self.model_copy(update={"next_work": next_work})

    def text(self, now_s: float) -> str:
        """1.2 GB of 2.5 GB, 48.0 MB/s, 27 s left."""
        if self.next_work:
            return self.next_work
        text = f"{decimal_size(max(0, self.sent_bytes))} of {decimal_size(self.total_bytes)}"
        passed_s = now_s - self.began_s
        if self.sent_bytes <= 0 or passed_s <= 0:
            return text
        rate = self.sent_bytes / passed_s
        return f"{text}, {decimal_size(int(rate))}/s, {(self.total_bytes - self.sent_bytes) / rate:.0f} s left"


def line_of(nodes: Mapping[str, TransferState], now_s: float) -> str:
    """One line for all nodes."""
    return "; ".join(f"{name}: {state.text(now_s)}" for name, state in nodes.items())
