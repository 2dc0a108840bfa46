"""Numbers of a report as a person reads them: "unknown" where one is not known, never 0. Pure."""

from __future__ import annotations

import time

from homelab.controller.base.units import gibibytes
from homelab.controller.dashboard import words

UNKNOWN = "unknown"
NONE = "–"


def figure(value: float | None) -> str:
    """Four digits at most, as short as the number allows: 0.000125, 1.234, 12 345."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 10_000:
        return words.count(value)
    if abs(value) < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:.4g}"


def tick(value: float, apart: float) -> str:
    """A number of an axis whose numbers are `apart`."""
    if abs(value) < apart * 1e-6:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.6g}" if apart >= 1e-3 else figure(value)


def percent(part: float | None) -> str:
    """Of a fraction: 41.3 %."""
    return UNKNOWN if part is None else f"{100 * part:.1f} %"


def memory(size_bytes: int | None) -> str:
    """12.3 GiB"""
    return UNKNOWN if size_bytes is None else f"{gibibytes(size_bytes):.2f} GiB"


def kwh(value: float | None) -> str:
    """0.0123 kWh: three digits that count, because a short run uses little."""
    return UNKNOWN if value is None else f"{value:.3g} kWh" if value < 100 else f"{words.count(value)} kWh"


def count(value: float | None) -> str:
    """12 345"""
    return UNKNOWN if value is None else words.count(value)


def moment(seconds: float | None, utc_offset_s: int) -> str:
    """2026-11-23 16:40:33 by the reader's clock."""
    return UNKNOWN if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds + utc_offset_s))


def zone(utc_offset_s: int) -> str:
    """UTC+01:00"""
    minutes = abs(utc_offset_s) // 60
    return f"UTC{'-' if utc_offset_s < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}" if minutes else "UTC"
