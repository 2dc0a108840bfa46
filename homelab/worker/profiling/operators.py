"""The dearest operators of a trace, by their own time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.shared.protocol import profile_files
from homelab.worker.profiling.trace_tree import STEP, Call, Event

MOST = 30  # rows of a rank: the ten dearest over all ranks are among them
_MOST_PLACES = 3
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class _Row:
    calls: int = 0
    self_us: float = 0.0
    device_us: float = 0.0
    places: dict[str, float] = field(default_factory=dict)


def dearest(calls: Iterable[Call], events: Iterable[Event], modules: Mapping[str, Sequence[str]], step_us: float) -> list[dict[str, Any]]:
    """Rows with "name", "calls", "self_s", "device_s", "share" of `step_us`, and "places": where it was called, the dearest first.

    By the time on the card where there is one, else on the processor. What a module does outside of all operators, as its own Python
    does, is a row, too: "Python of CLASS".
    """
    device_us = _by_external_id(events)
    is_on_card = bool(device_us)
    rows: defaultdict[str, _Row] = defaultdict(_Row)
    for call in calls:
        own_device_us = device_us.get(call.external, 0.0) if not call.is_range else 0.0
        row = rows[_label(call, modules)]
        row.calls += 1
        row.self_us += call.self_us
        row.device_us += own_device_us
        place = call.module or (f"{call.phase} of the step" if call.phase else "")
        row.places[place] = row.places.get(place, 0.0) + (own_device_us if is_on_card else call.self_us)
    ordered = sorted(rows.items(), key=lambda entry: -(entry[1].device_us if is_on_card else entry[1].self_us))
    return [_as_row(name, row, modules, step_us, is_on_card=is_on_card) for name, row in ordered[:MOST]]


def _by_external_id(events: Iterable[Event]) -> dict[Any, float]:
    """Time of the kernels that an operator started."""
    sums: defaultdict[Any, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in _KERNELS:
            sums[event.get("args", {}).get("External id")] += float(event.get("dur", 0.0))
    return dict(sums)


def _label(call: Call, modules: Mapping[str, Sequence[str]]) -> str:
    if not call.is_range:
        return call.name
    if call.name.startswith(profile_files.MODULE):
        return f"Python of {modules.get(call.module, ('a module',))[0]}"
    if call.name == profile_files.REDUCTION:
        return "waiting for other ranks"
    if call.name in profile_files.PHASES:
        return f"Python of the step's {call.name}"
    return "Python between the phases" if call.name.startswith(STEP) else f"Python of {call.name}"


def _as_row(name: str, row: _Row, modules: Mapping[str, Sequence[str]], step_us: float, *, is_on_card: bool) -> dict[str, Any]:
    whole = row.device_us if is_on_card else row.self_us
    places = [
        {
            "module": place,
            "class": modules.get(place, ("", ""))[0],
            "source": modules.get(place, ("", ""))[1],
            "share": part / whole if whole > 0 else 0.0,
        }
        for place, part in sorted(row.places.items(), key=lambda entry: -entry[1])[:_MOST_PLACES]
        if place
    ]
    return {
        "name": name, "calls": row.calls, "self_s": row.self_us / 1e6, "device_s": row.device_us / 1e6, "share": whole / step_us if step_us else 0.0,
        "places": places,
    }  # fmt: skip
