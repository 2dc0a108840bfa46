"""How long each exchange takes, and how much of that the rank computes meanwhile. Pure. Times are microseconds of the trace.

On a processor gloo reduces a bucket in threads of its own while the backward pass goes on: until the rank's last gradient is ready it
computes, and after it, it waits. A gather or a scatter there is waited for at once. On a card NCCL's kernels stand in the trace: what other
kernels run at the same time is overlap. NCCL runs those of one kind in the order of the calls; a kernel of another kind (the sums between machines
of hsdp, a count of rows) moves none of them.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.worker.profiling.trace_tree import Event

Span = tuple[float, float]
_ASYNCHRONOUS = "all-reduce"
# kind: what NCCL calls its kernel, in small letters
_KERNELS = {"all-reduce": "allreduce", "gather": "allgather", "scatter": "reducescatter"}


@dataclass(frozen=True)
class TracedExchange:
    """One exchange with its place in the trace."""

    name: str
    kind: str
    payload_bytes: int
    sent_bytes: float
    begin_us: float
    end_us: float
    overlap_us: float


def placed(
    entries: Iterable[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], events: Sequence[Event], base_ns: int
) -> list[TracedExchange]:
    """The noted exchanges (Unix nanoseconds) with their overlap. `base_ns`: the zero of the trace's times."""
    noted = sorted(entries, key=lambda entry: int(entry["begin_ns"]))
    ready_us = {int(step["begin_ns"]): (step["ready_ns"] - base_ns) / 1e3 for step in steps if step.get("ready_ns")}
    ours, others = _kernels(events)
    calls = Counter(entry["kind"] for entry in noted)
    left = {kind: iter(spans) for kind, spans in ours.items() if len(spans) == calls[kind]}
    exchanges = []
    for entry in noted:
        span = ((entry["begin_ns"] - base_ns) / 1e3, (entry["end_ns"] - base_ns) / 1e3)
        if entry["kind"] in left:
            span = next(left[entry["kind"]])
            overlap_us = _covered(span, others)
        else:
            ready = ready_us.get(max((begin for begin in ready_us if begin <= entry["begin_ns"]), default=0), span[0])
            overlap_us = max(0.0, min(span[1], ready) - span[0]) if entry["kind"] == _ASYNCHRONOUS else 0.0
        exchanges.append(TracedExchange(entry["name"], entry["kind"], entry["payload_bytes"], entry["sent_bytes"], *span, overlap_us))
    return exchanges


def table(exchanges: Iterable[TracedExchange]) -> list[dict[str, Any]]:
    """One row per name: "name", "kind", "calls", "payload_bytes", "sent_bytes", "seconds", "overlap_s", of all profiled steps together."""
    rows: dict[str, dict[str, Any]] = {}
    for one in exchanges:
        row = rows.setdefault(
            one.name,
            {"name": one.name, "kind": one.kind, "calls": 0, "payload_bytes": 0, "sent_bytes": 0.0, "seconds": 0.0, "overlap_s": 0.0},
        )
        row["calls"] += 1
        row["payload_bytes"] += one.payload_bytes
        row["sent_bytes"] += one.sent_bytes
        row["seconds"] += (one.end_us - one.begin_us) / 1e6
        row["overlap_s"] += one.overlap_us / 1e6
    return [{**row, "sent_bytes": round(row["sent_bytes"])} for row in rows.values()]


def _kernels(events: Iterable[Event]) -> tuple[dict[str, list[Span]], list[Span]]:
    """NCCL's kernels of each kind in their order, and those that compute as spans that do not touch."""
    ours: dict[str, list[Span]] = {}
    others: list[Span] = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "kernel":
            begin, name = float(event["ts"]), str(event["name"]).lower()
            span = (begin, begin + float(event.get("dur", 0.0)))
            if "nccl" not in name:
                others.append(span)
            else:
                ours.setdefault(next((kind for kind, word in _KERNELS.items() if word in name.replace("_", "")), ""), []).append(span)
    return {kind: sorted(spans) for kind, spans in ours.items()}, _union(sorted(others))


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for begin, end in spans:
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def _covered(span: Span, others: Sequence[Span]) -> float:
    first = max(0, bisect.bisect_left(others, span) - 1)
    total = 0.0
    for begin, end in others[first:]:
        if begin >= span[1]:
            break
        total += max(0.0, min(end, span[1]) - max(begin, span[0]))
    return total
