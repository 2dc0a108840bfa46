"""Which machines of a network listen on SSH's port: asked for by a person only (`homelab init --scan`)."""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor

MOST_ADDRESSES = 256
_TIMEOUT_S = 1.0  # a machine of the own LAN answers within milliseconds
_AT_ONCE = 64


def listening(network: str, port: int = 22) -> list[str]:
    """The addresses of an IPv4 network (a /24 at most) that accept a connection on this port; nothing is sent. Raises ValueError for a larger network."""
    place = ipaddress.IPv4Network(network)
    if place.num_addresses > MOST_ADDRESSES:
        raise ValueError(f"{network} has more than {MOST_ADDRESSES} addresses")
    addresses = [str(address) for address in place.hosts()]

    def one(address: str) -> bool:
        try:
            socket.create_connection((address, port), timeout=_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="scan") as pool:
        return [address for address, is_open in zip(addresses, pool.map(one, addresses), strict=True) if is_open]
