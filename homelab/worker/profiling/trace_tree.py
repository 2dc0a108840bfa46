"""The events of a Chrome trace as calls within calls: what an event costs itself, in which phase, and for which module. Pure.

Times are microseconds of the trace. Operators of the backward pass run outside their module; the trace connects each to the forward operator
whose gradient it computes ("fwdbwd" flows, torch/csrc/profiler), and so to its module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.shared.protocol import profile_files

Event = Mapping[str, Any]
STEP = "ProfilerStep#"
_ASYNCHRONOUS = ("gloo:", "nccl:")  # from the call to its end, whatever its thread does meanwhile
_CALLS = ("cpu_op", "user_annotation")


@dataclass
class Call:
    """One operator or range of a thread. `external` connects it with the kernels that it started."""

    name: str
    thread: Any
    begin_us: float
    end_us: float
    external: Any = None
    self_us: float = 0.0
    phase: str = ""
    module: str = ""
    is_range: bool = False
    children: list[Call] = field(default_factory=list)


def calls(events: Sequence[Event]) -> list[Call]:
    """All calls in the order of their beginnings, with their own time, phase and module."""
    every = [
        _call(event)
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _CALLS and not str(event["name"]).startswith(_ASYNCHRONOUS)
    ]
    every.sort(key=lambda call: (str(call.thread), call.begin_us, -call.end_us))
    roots = _nested(every)
    forward = _modules_by_flow(events, roots)
    for call in roots:
        _described(call, "", "", forward)
    return every


def _call(event: Event) -> Call:
    begin = float(event["ts"])
    return Call(
        str(event["name"]), (event.get("pid"), event.get("tid")), begin, begin + float(event.get("dur", 0.0)), event.get("args", {}).get("External id"),
        is_range=event["cat"] == "user_annotation",
    )  # fmt: skip


def _nested(every: Iterable[Call]) -> list[Call]:
    roots: list[Call] = []
    stack: list[Call] = []
    for call in every:
        while stack and (stack[-1].thread != call.thread or stack[-1].end_us <= call.begin_us):
            stack.pop()
        if stack:
            call.end_us = min(call.end_us, stack[-1].end_us)  # rounded numbers
            stack[-1].children.append(call)
        else:
            roots.append(call)
        stack.append(call)
        call.self_us = call.end_us - call.begin_us
    for call in every:
        for child in call.children:
            call.self_us -= child.end_us - child.begin_us
    return roots


def _described(call: Call, phase: str, module: str, by_flow: Mapping[tuple[Any, float], str]) -> None:
    stack = [(call, phase, module)]
    while stack:
        one, phase, module = stack.pop()
        if one.is_range and one.name in profile_files.PHASES:
            phase = one.name
        if one.is_range and one.name.startswith(profile_files.MODULE):
            module = one.name[len(profile_files.MODULE) :]
        module = by_flow.get((one.thread, one.begin_us), module)
        one.phase, one.module = phase, module
        stack.extend((child, phase, module) for child in one.children)


def _modules_by_flow(events: Iterable[Event], roots: Iterable[Call]) -> dict[tuple[Any, float], str]:
    """(thread, beginning) of a backward operator -> the module of the forward operator whose gradient it computes."""
    modules: dict[tuple[Any, float], str] = {}
    stack = [(root, "") for root in roots]
    while stack:
        call, module = stack.pop()
        if call.is_range and call.name.startswith(profile_files.MODULE):
            module = call.name[len(profile_files.MODULE) :]
        if module:
            modules[(call.thread, call.begin_us)] = module
        stack.extend((child, module) for child in call.children)
    begins: dict[Any, tuple[Any, float]] = {}
    ends: dict[Any, tuple[Any, float]] = {}
    for event in events:
        if event.get("cat") == "fwdbwd":
            place = ((event.get("pid"), event.get("tid")), float(event["ts"]))
            (begins if event["ph"] == "s" else ends)[event["id"]] = place
    return {end: modules[begins[flow]] for flow, end in ends.items() if begins.get(flow) in modules}
