"""Wake-on-LAN: the packet that a sleeping network card waits for (AMD, Magic Packet Technology, 1995): six bytes FF, then its MAC address 16 times."""

from __future__ import annotations

import ipaddress
import socket

PORT = 9  # "discard": nobody listens there; the card looks at the bytes alone
_TIMES = 3  # a packet may get lost, and nobody confirms one


def packet(mac: str) -> bytes:
    """The 102 bytes for a MAC address like "2c:f0:5d:00:11:22". Raises ValueError for anything else."""
    address = bytes.fromhex(mac.replace(":", ""))
    if len(address) != 6:
        raise ValueError(f"{mac!r} is not the address of a network card")
    return b"\xff" * 6 + address * 16


def send(mac: str, network: str, port: int = PORT) -> None:
    """Send the packet to every machine of `network` ("192.168.1.0/24"), of which this machine is a part. Raises OSError and ValueError."""
    broadcast = str(ipaddress.IPv4Network(network).broadcast_address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        for _ in range(_TIMES):
            sender.sendto(packet(mac), (broadcast, port))


def is_in(network: str) -> bool:
    """Whether this machine has an address in `network`. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        try:
            probe.connect((str(ipaddress.IPv4Network(network).broadcast_address), PORT))
        except OSError:
            return False
        return ipaddress.IPv4Address(probe.getsockname()[0]) in ipaddress.IPv4Network(network)
