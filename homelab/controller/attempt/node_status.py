"""What a node says while a run is followed (`homelab.node.run.status_stream` writes these lines; here they get types). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from homelab.controller.base.models import WireModel
from homelab.controller.remote.poll_reply import MOST_RANKS, ExitOrNone, Number, Rank

STOPPED = frozenset("Tt")
DEAD = frozenset({"", "Z", "X"})


class RankStatus(WireModel):
    """One worker process. `still_s`: how long it has given no sign (`homelab.node.run.status_stream`), by the node's monotonic clock."""

    pid: int | None = None
    state: str = ""  # the kernel's letter; "" gone
    phase: str = "absent"  # absent, then those of the heartbeat
    step: Number = 0
    still_s: float = 0.0
    error: bool = False

    @property
    def has_begun(self) -> bool:
        """It wrote a heartbeat in this attempt."""
        return self.phase != "absent"

    @property
    def is_dead(self) -> bool:
        """It had begun and its process is gone, before it was done."""
        return self.has_begun and self.phase != "done" and self.state in DEAD


class NodeStatus(WireModel):
    """One node. `heard_s` is how long ago the line came, by the controller's monotonic clock (set there)."""

    attempt: Number
    newest: Number = 0
    started: bool = False
    stopping: bool = False  # a stop was asked for: `homelab.node.run.torchrun.mark_stop` comes before any signal
    agent: str = ""
    torchrun: str = ""
    exit: ExitOrNone = None
    checkpoint: Number = 0  # step of the newest one that is complete on this node
    ranks: Annotated[dict[Rank, RankStatus], Field(max_length=MOST_RANKS)] = {}
    # node that this one once reached -> for how long it has not any more (`homelab.node.run.peer_probe`)
    missing_s: Annotated[dict[str, float], Field(max_length=1000)] = {}
    heard_s: float = 0.0


def common_checkpoint(statuses: Mapping[str, NodeStatus]) -> int:
    """The step of the newest checkpoint that all nodes hold; 0 where one holds none."""
    return min((status.checkpoint for status in statuses.values()), default=0)
