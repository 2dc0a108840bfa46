"""What the lines of `meet` say: where a node listens, and what its dials to the others measured. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from homelab.controller.base.models import WireModel
from homelab.controller.remote.bounds import MOST_NODES, Count, Milliseconds, NodeName, Number
from homelab.controller.remote.poll_reply import Line


class Dial(WireModel):
    """One dial of `meet`, or what it measured of one pair (`homelab.controller.checks.evidence.Link` has the fields)."""

    node: NodeName
    address: NodeName
    port: Number
    latency_ms: Milliseconds | None = None
    median_ms: Milliseconds | None = None
    worst_ms: Milliseconds | None = None
    throughput_bytes_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    stalled: Line | None = None
    carried_bytes: Count | None = None
    lost_bytes: Count | None = None
    repeats: Count = 0
    sent: Count | None = None
    error: Line | None = None


class Dials(WireModel):
    """A line of `meet`."""

    links: Annotated[tuple[Dial, ...], Field(max_length=50_000)]
    counted: Annotated[dict[NodeName, Count], Field(max_length=MOST_NODES)] = {}
    dropped: Count = 0


class Listening(WireModel):
    """The first line of `meet`."""

    ports: Annotated[tuple[Annotated[int, Field(ge=0, le=65535)], ...], Field(max_length=100)]
    rendezvous: Annotated[int, Field(ge=0, le=65535)] | None = None
    udp: Annotated[int, Field(ge=0, le=65535)] | None = None
    burst: Annotated[int, Field(ge=0, le=65535)] | None = None
    error: Line | None = None
