"""The report's section about profiled steps: the dearest operators, the exchanges between ranks, and memory beside the plan. Pure."""

from __future__ import annotations

from homelab.controller.base.units import gibibytes
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.page_tables import Look, ReportTable
from homelab.controller.features.report.run_report import Profiled

_MOST_EXCHANGES = 24


def note(profiled: Profiled) -> str:
    """Which steps the profiler saw."""
    first, last = profiled.steps
    steps = f"steps {first} to {last}" if first != last else f"step {first}"
    return f"Torch's profiler saw {steps} on rank {', '.join(map(str, profiled.ranks))}; profiled steps are slower than others."


def tables(profiled: Profiled) -> list[ReportTable]:
    """Three; the one about exchanges is left out where one rank trains alone."""
    return [_operators(profiled), *([_exchanges(profiled)] if profiled.exchanges else []), _memory(profiled)]


def _operators(profiled: Profiled) -> ReportTable:
    heads: list[tuple[str, Look]] = [
        ("operator", ""),
        ("calls", "n"),
        ("seconds", "n"),
        ("of the steps", "n"),
        ("mostly called by", "text"),
        ("of it", "n"),
    ]
    rows = [
        (
            row.name,
            str(row.calls),
            f"{row.seconds:.3f}",
            f"{row.share:.1%}",
            row.place or text.NONE,
            text.NONE if row.place_share is None else f"{row.place_share:.0%}",
        )
        for row in profiled.operators
    ]
    return ReportTable("The slowest operators, by their own time on all of these ranks", heads, rows)


def _exchanges(profiled: Profiled) -> ReportTable:
    heads: list[tuple[str, Look]] = [
        ("exchange", ""),
        ("kind", ""),
        ("calls", "n"),
        ("MB sent", "n"),
        ("seconds", "n"),
        ("while computing", "n"),
    ]
    dearest = sorted(profiled.exchanges, key=lambda row: -row.sent_bytes)[:_MOST_EXCHANGES]
    rows = [
        (
            row.name,
            row.kind,
            f"{row.calls:.0f}",
            f"{row.sent_bytes / 1e6:.3f}",
            f"{row.seconds:.3f}",
            text.NONE if row.overlap is None else f"{row.overlap:.0%}",
        )
        for row in dearest
    ]
    whole = sum(row.sent_bytes for row in profiled.exchanges) / 1e6
    return ReportTable(f"What a rank exchanges in a step: it sends {whole:.3f} MB", heads, rows)


def _memory(profiled: Profiled) -> ReportTable:
    heads: list[tuple[str, Look]] = [("rank", ""), ("most held", "n"), ("planned", "n"), ("at", "")]
    rows = [
        (f"{row.rank} ({row.node})", _gib(row.peak_bytes), _gib(row.predicted_bytes), row.peak_phase or text.NONE)
        for row in profiled.memory
    ]
    return ReportTable("Memory of torch, compared with the plan", heads, rows)


def _gib(size_bytes: int | None) -> str:
    return text.UNKNOWN if size_bytes is None else f"{gibibytes(size_bytes):.2f} GiB"
