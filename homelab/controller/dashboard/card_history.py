"""What was seen of the cards and networks at the last looks, added to a snapshot. Pure."""

from __future__ import annotations

import math

from homelab.controller.dashboard.snapshot import Course, GpuRow, NodeRow, Snapshot

LOOKS = 60  # at one look in two seconds: the last two minutes


def with_history(now: Snapshot, before: Snapshot | None) -> Snapshot:
    """The snapshot with the courses that `before` (of the same run, one look earlier) ends with, and its own values behind them."""
    earlier = {row.name: row for row in before.nodes} if before else {}
    return now.model_copy(update={"nodes": tuple(_node(row, earlier.get(row.name)) for row in now.nodes)})


def _node(row: NodeRow, before: NodeRow | None) -> NodeRow:
    cards = {card.index: card for card in before.gpus} if before else {}
    if not row.reachable:  # its courses go on with gaps, so that they are there when it answers again
        silent = tuple(_card(GpuRow(name=card.name, index=card.index, is_left_out=card.is_left_out), card) for card in cards.values())
        return row.model_copy(update={"network": _longer(before.network, None), "gpus": silent}) if before else row
    received, sent = rates(row, before)
    both = None if received is None or sent is None else received + sent
    return row.model_copy(update={
        "received_bytes_per_s": received, "sent_bytes_per_s": sent, "network": _longer(before.network if before else Course(), both),
        "gpus": tuple(_card(card, cards.get(card.index)) for card in row.gpus),
    })  # fmt: skip


def rates(row: NodeRow, before: NodeRow | None) -> tuple[float | None, float | None]:
    """(received, sent) bytes per second between two looks; None where one is missing, or the counters began anew (a restart)."""
    if before is None or None in (row.counted_at_s, before.counted_at_s):
        return None, None
    passed_s = (row.counted_at_s or 0.0) - (before.counted_at_s or 0.0)

    def rate(new: int | None, old: int | None) -> float | None:
        return None if new is None or old is None or new < old or passed_s <= 0 else (new - old) / passed_s

    return rate(row.received_bytes, before.received_bytes), rate(row.sent_bytes, before.sent_bytes)


def _card(card: GpuRow, before: GpuRow | None) -> GpuRow:
    empty = GpuRow(name=card.name)
    then = before if before and before.name == card.name else empty  # another card in its place has a course of its own
    peaks = [peak for peak in (card.memory_used_bytes, then.memory_peak_bytes) if peak is not None]
    return card.model_copy(update={
        "memory_peak_bytes": max(peaks, default=None), "busy": _longer(then.busy, card.utilisation_percent),
        "memory": _longer(then.memory, card.memory_used_bytes), "temperature": _longer(then.temperature, card.temperature_c),
        "power": _longer(then.power, card.power_w),
    })  # fmt: skip


def _longer(course: Course, value: float | None) -> Course:
    told = value if value is not None and math.isfinite(value) else None
    return Course(values=(*course.values, told)[-LOOKS:])
