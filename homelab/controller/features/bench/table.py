"""The results as CSV, a line for each run, and as a table for people, a line for each cell. Pure."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterable, Sequence

from rich.table import Table

from homelab.controller.base.units import gibibytes
from homelab.controller.features.bench.result import Result, Summary

COLUMNS = (
    "variation", "strategy", "nodes", "node_count", "repeat", "state", "because", "run", "tries", "tokens_per_s", "step_s", "step_s_low", "step_s_high",
    "steps", "tokens", "compute", "wire", "wait", "input", "memory_bytes_most", "memory_bytes_by_rank", "loss", "plan_tokens_per_s", "plan_is_measured", "joules",
    "joules_per_token", "precision", "devices", "versions", "ended_at",
)  # fmt: skip
HEADINGS = ("cell", "runs", "tokens/s", "lowest to highest", "step", "wire", "wait", "input", "efficiency", "plan", "memory", "loss")
_ON_A_TERMINAL = ("cell", "tokens/s", "lowest to highest", "step", "wire", "efficiency", "plan")


def as_csv(results: Iterable[Result]) -> str:
    """UTF-8, a heading first; unknown figures are empty. Times are UTC."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for result in results:
        measured = result.measured
        row = {name: getattr(result, name) for name in COLUMNS if name in Result.model_fields}
        if measured is not None:
            row |= {name: _digits(getattr(measured, name)) for name in COLUMNS if name in type(measured).model_fields}
            row["memory_bytes_most"] = max(measured.memory_bytes.values(), default=None)
            row["memory_bytes_by_rank"] = _pairs(measured.memory_bytes)
        writer.writerow(
            row | {
                "nodes": " ".join(result.nodes), "node_count": len(result.nodes), "devices": _pairs(result.devices), "versions": _pairs(result.versions),
                "plan_tokens_per_s": _digits(result.plan_tokens_per_s), "joules_per_token": _digits(result.joules_per_token),
                "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(result.ended_at)),
            }
        )  # fmt: skip
    return text.getvalue()


def rows(cells: Sequence[Summary]) -> list[tuple[str, ...]]:
    """Under HEADINGS; a cell without a figure has its reason in place of them."""
    lines = []
    for cell in cells:
        if cell.tokens_per_s is None or cell.tokens_per_s_low is None or cell.tokens_per_s_high is None:
            lines.append((cell.cell.label, "0", *([""] * (len(HEADINGS) - 2))))
            continue
        lines.append((
            cell.cell.label, str(cell.runs), _number(cell.tokens_per_s), f"{_number(cell.tokens_per_s_low)} to {_number(cell.tokens_per_s_high)}",
            f"{_number(cell.step_s)} s", _percent(cell.wire), _percent(cell.wait), _percent(cell.input), _percent(cell.efficiency), _percent(cell.plan_error, sign=True),
            "" if cell.memory_bytes is None else f"{gibibytes(cell.memory_bytes):.2f} GiB", _number(cell.loss),
        ))  # fmt: skip
    return lines


def table(cells: Sequence[Summary]) -> Table:
    """For a terminal of 80 columns; the page has the rest."""
    shown = Table(box=None, pad_edge=False)
    for heading in _ON_A_TERMINAL:
        shown.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=heading != HEADINGS[0])
    for line in rows(cells):
        shown.add_row(*(line[HEADINGS.index(heading)] for heading in _ON_A_TERMINAL))
    return shown


def reasons(cells: Sequence[Summary]) -> list[str]:
    """Why a cell has no figure, or fewer runs."""
    return [f"{cell.cell.label}: {cell.because}" for cell in cells if cell.because]


def _digits(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _percent(value: float | None, *, sign: bool = False) -> str:
    return "" if value is None else f"{value:{'+' if sign else ''}.0%}"


def _pairs(values: dict[str, str] | dict[str, int]) -> str:
    return "; ".join(f"{name}={value}" for name, value in values.items())
