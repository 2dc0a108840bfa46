"""How large the wheels of a lock are, asked of the servers that have them, before anything is fetched."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

_TIMEOUT_S = 10.0
_AT_ONCE = 16


def by_address(addresses: Iterable[str]) -> dict[str, int]:
    """{address: bytes}, without those whose server does not say."""
    addresses = list(addresses)
    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="size") as pool:
        return {address: size for address, size in zip(addresses, pool.map(_size, addresses), strict=True) if size}


def _size(address: str) -> int:
    try:
        # a file's address, too
        with urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_TIMEOUT_S) as answer:
            return int(answer.headers.get("Content-Length") or 0)
    except (OSError, ValueError):
        return 0
