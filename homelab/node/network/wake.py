"""Waking another machine of this node's LAN, for a controller that is not in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from homelab.shared.protocol import magic_packet
from homelab.shared.protocol.network_messages import PacketSent

if TYPE_CHECKING:
    from homelab.shared.protocol.network_messages import WakeRequest


def wake(request: WakeRequest) -> PacketSent:
    """Send the packet for `mac` into `network`, where this node is a part of it."""
    if not magic_packet.is_in(request.network):
        return PacketSent(sent=False)
    magic_packet.send(request.mac, request.network)
    return PacketSent(sent=True)
