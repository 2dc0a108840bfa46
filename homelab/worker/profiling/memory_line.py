"""Bytes held over the time of the profiled steps, from the memory events of a trace. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from homelab.worker.profiling.trace_tree import Call, Event

MOST_POINTS = 240
_MEMORY = "[memory]"
_PROCESSOR, _CARD = 0, 1  # c10::DeviceType


def line(events: Iterable[Event], calls: Iterable[Call], held_bytes: int, *, on_card: bool, from_us: float) -> dict[str, Any]:
    """{"points": [[seconds, bytes], ...], "peak_bytes", "peak_s", "peak_phase"}. Of each part of the time the most that was held is kept.

    On a card the allocator's own count; on a processor `held_bytes`, what was held before, and what changed since.
    """
    kind = _CARD if on_card else _PROCESSOR
    changes = sorted(
        (float(event["ts"]), int(event["args"]["Total Allocated"]))
        for event in events
        if event.get("name") == _MEMORY and event["args"].get("Device Type") == kind and float(event["ts"]) >= from_us
    )
    if not changes:
        return {"points": [], "peak_bytes": None, "peak_s": None, "peak_phase": ""}
    base = 0 if on_card else held_bytes
    points = [((at_us - from_us) / 1e6, base + allocated) for at_us, allocated in changes]
    peak_s, peak_bytes = max(points, key=lambda point: point[1])
    at_us = peak_s * 1e6 + from_us
    phase = next((call.phase for call in calls if call.phase and call.begin_us <= at_us <= call.end_us), "")
    return {
        "points": [[round(at_s, 6), size] for at_s, size in _fewer(points)],
        "peak_bytes": peak_bytes,
        "peak_s": peak_s,
        "peak_phase": phase,
    }


def _fewer(points: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most MOST_POINTS: the highest of each part of the time."""
    if len(points) <= MOST_POINTS:
        return points
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / MOST_POINTS or 1.0
    highest: dict[int, tuple[float, int]] = {}
    for point in points:
        part = min(MOST_POINTS - 1, int((point[0] - begin) / width))
        if part not in highest or point[1] > highest[part][1]:
            highest[part] = point
    return [highest[part] for part in sorted(highest)]
