"""How many bytes the machine's network cards have carried, as the kernel counts them. Files only, no programs."""

from __future__ import annotations

import os
import time

from homelab.shared.protocol.run_messages import NodeLoad

_COUNTERS = "/proc/net/dev"
_INTERFACES = "/sys/class/net"


def read() -> NodeLoad:
    """Bytes received and sent since the machine started, and when they were counted; None where the kernel does not tell."""
    try:
        with open(_COUNTERS) as stream:
            counted = parse(stream.read())
    except (OSError, ValueError, IndexError):
        return NodeLoad()
    names = [name for name in counted if name != "lo"]
    # What a bridge, a container or a tunnel carries passes a real card once more. Where there is no real card (a container) all count.
    real = [name for name in names if os.path.exists(os.path.join(_INTERFACES, name, "device"))]
    pairs = [counted[name] for name in real or names]
    return NodeLoad(received_bytes=sum(pair[0] for pair in pairs), sent_bytes=sum(pair[1] for pair in pairs), counted_at_s=time.monotonic())


def parse(text: str) -> dict[str, tuple[int, int]]:
    """Interface -> (bytes received, bytes sent) of the text of /proc/net/dev."""
    counted = {}
    for line in text.splitlines():
        name, colon, fields = line.partition(":")
        if colon:
            words = fields.split()
            counted[name.strip()] = (int(words[0]), int(words[8]))
    return counted
