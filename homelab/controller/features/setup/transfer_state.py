"""How far the transfer to a node is, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.controller.base.models import Value
from homelab.controller.base.units import decimal_size


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
