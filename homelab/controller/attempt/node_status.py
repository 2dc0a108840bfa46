"""What a node says while a run is followed, and how long ago that was. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.shared.protocol.run_messages import StatusLine

STOPPED = frozenset("Tt")


class NodeStatus(StatusLine):
    """One node. `heard_s` is how long ago the line came, by the controller's monotonic clock (set there)."""

    heard_s: float = 0.0


def common_checkpoint(statuses: Mapping[str, NodeStatus]) -> int:
    """The step of the newest checkpoint that all nodes hold; 0 where one holds none."""
    return min((status.checkpoint for status in statuses.values()), default=0)
