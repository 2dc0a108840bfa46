"""The messages of the node program about its ports, waking another machine, and the dials between nodes."""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import Above, AtLeast, AtMost, Below, Longest
from homelab.shared.protocol.marks import FINITE, MOST_NODES, Count, Duration, Line, NodeName, PortNumber
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request

FreePort = Annotated[int, AtLeast(0), AtMost(65535)]


class FreePortRequest(Request):
    """`free-port`: the first one that is asked about."""

    low: Count = 29501


class WakeRequest(Request):
    """`wake`. `network`: "192.168.1.0/24", that of the machine that sleeps."""

    mac: Annotated[str, Longest(17)]
    network: Annotated[str, Longest(50)]


class MeetRequest(Request):
    """`meet`: where to listen, and for how long. `port`: that of the rendezvous, None where it is not tried here."""

    address: NodeName
    port: Optional[PortNumber] = None
    seconds: Duration = 60.0


class Port(Message):
    """The answer of `free-port`."""

    port: PortNumber


class PacketSent(Message):
    """The answer of `wake`: whether this node is in the sleeper's network, and has sent the packet there."""

    sent: bool


class Listening(Message):
    """The first line of `meet`: the ports on which this node listens, None where it cannot."""

    ports: Annotated[tuple[FreePort, ...], Longest(100)]
    rendezvous: FreePort | None = None
    udp: FreePort | None = None
    burst: FreePort | None = None
    error: Line | None = None


class Dial(Message):
    """One dial in a line of `meet`, or what was measured of one pair (`homelab.controller.checks.evidence.Link` has the fields).

    `repeats`: packets of its handshakes that were sent again; `sent`: packets of a burst.
    """

    node: NodeName
    address: NodeName
    port: Annotated[int, AtLeast(-1), Below(2**31)]
    latency_ms: Duration | None = None
    median_ms: Duration | None = None
    worst_ms: Duration | None = None
    throughput_bytes_per_s: Annotated[float, Above(0), FINITE] | None = None
    stalled: Line | None = None
    carried_bytes: Count | None = None
    lost_bytes: Count | None = None
    repeats: Count = 0
    sent: Count | None = None
    error: Line | None = None


class Dials(Message):
    """A line of `meet`. `counted`: token of a burst -> packets that arrived; `dropped`: by the socket, since it was asked last."""

    links: Annotated[tuple[Dial, ...], Longest(50_000)]
    counted: Annotated[dict[NodeName, Count], Longest(MOST_NODES)] = {}
    dropped: Count = 0
