"""Numbers with their units, as a person reads them. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable

GIB = 2**30


def listed(names: Iterable[str]) -> str:
    """'tower, laptop and oldtower'."""
    items = list(names)
    return " and ".join([", ".join(items[:-1]), items[-1]]) if len(items) > 1 else "".join(items)


def local_moment(moment_s: float, now_s: float) -> str:
    """'03:10', in the time of this machine, with the day where it is not within the next twelve hours or today: 'Fri 27 Nov 03:10'. Both since 1970."""
    moment, now = time.localtime(moment_s), time.localtime(now_s)
    is_near = moment[:3] == now[:3] or abs(moment_s - now_s) < 12 * 3600
    return time.strftime("%H:%M" if is_near else "%a %d %b %H:%M", moment)


def decimal_size(size_bytes: int) -> str:
    """'1.2 MB', for disks and files: powers of ten, as their makers count."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.1f} {unit}"
    return f"{size_bytes} bytes"


def gigabytes(size_bytes: float, form: str = ".1f") -> str:
    """'1.2', the number of "1.2 GB": powers of ten. `form` is a format of the number: ".2g" keeps two digits of any size."""
    return f"{size_bytes / 1e9:{form}}"


def megabytes(size_bytes: float, form: str = ".1f") -> str:
    """'117.6', the number of "117.6 MB" and of "117.6 MB/s": powers of ten. `form` as of `gigabytes`."""
    return f"{size_bytes / 1e6:{form}}"


def memory_gb(size_bytes: float, digits: int = 1) -> str:
    """'7.6', the number of "7.6 GB" on the dashboard, which counts memory in units of 2**30 bytes as its makers label it."""
    return f"{size_bytes / GIB:.{digits}f}"


def gibibytes(size_bytes: float) -> float:
    """7.6 of "7.6 GiB": powers of two, as makers of cards count."""
    return size_bytes / GIB


def binary_size(size_bytes: int) -> str:
    """'7.6 GiB', for memory: powers of two, as nvidia-smi and the kernel count."""
    return f"{gibibytes(size_bytes):.1f} GiB"
