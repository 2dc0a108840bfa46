"""The lines of events.jsonl as rows of the dashboard, in the order in which they happened. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from homelab.controller.dashboard.snapshot import EventRow
from homelab.controller.run import events as run_events
from homelab.shared.protocol.rank_messages import Metric


def event_rows(events: Iterable[Mapping[str, Any]], moves: Sequence[Metric]) -> tuple[EventRow, ...]:
    """What the controller wrote down, and the rows that the ranks moved among themselves (`moves`); each in its own order, together by time."""
    moved = [EventRow(time=line.time, text=line.message) for line in moves]
    written = [event_row(event) for event in events]
    return tuple(row for _, row in heapq.merge(_rising(written), _rising(moved), key=lambda entry: entry[0]))


def _rising(rows: Sequence[EventRow]) -> list[tuple[float, EventRow]]:
    """Each row with a time that never falls: where the clock was set back, what came after is counted on from there."""
    shift_s, timed = 0.0, []
    for before, row in zip([None, *rows], rows, strict=False):
        shift_s += max(0.0, before.time - row.time) if before else 0.0
        timed.append((row.time + shift_s, row))
    return timed


def event_row(event: Mapping[str, Any]) -> EventRow:
    """One line of events.jsonl: {"time", "what", and details}."""
    return EventRow(time=float(event.get("time") or 0.0), text=run_events.text_of(event), tone=run_events.read(event).tone)
