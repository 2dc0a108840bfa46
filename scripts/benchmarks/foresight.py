"""What `homelab plan --offline` says before anything runs, against what others have measured and published (scripts/benchmarks/published).

time_median_factor           planned tokens per second over published ones, or the reverse where that is above 1; the median over rows
time_worst_factor            and the worst
memory_median_error_percent  planned bytes against published ones, of rows whose program does what homelab does
told_median_factor           time_median_factor, where a plan also knows what the others of these rows say of the card, and not the row itself
wrong_fits                   settings that ran out of memory for others, and that a plan says fit
relative_median_factor       speeds of cards against an RTX 3090, of Lambda's list

A row of another method (GPTQ, DeepSpeed, a cold first step) is shown and not counted, with its reason. `--rows FILE` takes rows in a CSV file
with the same columns in the place of the project's own. Nothing is measured here: no row is of homelab itself.

The table of measured cards that `homelab plan` reads (homelab/controller/planning/speed/measured_cards.jsonl) holds these very rows: it is left out
here, or every row would be foretold by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.published import outcomes, relative, rows, shared
from benchmarks.published.rows import Row
from rich.console import Console
from rich.table import Table

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.planning import plan as planning
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.speed import measured_cards
from homelab.controller.planning.speed.measured_cards import MeasuredCard

LEFT_OUT = "the table of measured cards that homelab plan reads is left out here: it holds these rows (told_median_factor: every row by the others)"
# Of the bytes of a plan, those that the published figure has not.
_APART = {"allocated": (*rank_memory.BESIDE_TORCH, rank_memory.ALLOCATOR), "reserved": rank_memory.BESIDE_TORCH}


@dataclass(frozen=True)
class Forecast:
    """A row, and what the plan says of it. `verdict`: fits, tight, does not fit, or not known; `refused`: why there is no plan."""

    row: Row
    tokens_per_s: float | None = None
    memory_gb: float | None = None
    verdict: str = "does not fit"
    refused: str = ""

    @property
    def time_factor(self) -> float | None:
        """Planned over published."""
        return self.tokens_per_s / self.row.tokens_per_s if self.tokens_per_s and self.row.tokens_per_s else None

    @property
    def memory_error(self) -> float | None:
        """Planned over published, less 1."""
        return self.memory_gb / self.row.memory_gb - 1 if self.memory_gb and self.row.memory_gb else None


def forecast(row: Row, told: Sequence[MeasuredCard] = ()) -> Forecast:
    """What a plan says of this row that knows of measured cards what is `told`."""
    try:
        plan = planning.make(dataclasses.replace(row.inputs(), measured_cards=measured_cards.Table(tuple(told))))
    except HomelabError as error:
        return Forecast(row, refused=error.message)
    memory = plan.ranks[0].memory
    if memory is None or plan.time is None:
        return Forecast(row, refused="the plan knows no memory or no time")
    verdict = "not known" if memory.fits is None else "tight" if memory.is_tight else "fits" if memory.fits else "does not fit"
    apart = sum(item.size_bytes for item in memory.items if item.name in _APART.get(row.memory_kind, ()))
    return Forecast(row, plan.time.tokens_per_s, (memory.total_bytes - apart) / 1e9, verdict)


def told(all_rows: Sequence[Row]) -> list[Forecast]:
    """Every row that can be shared, foretold with what all others of them say of its card."""
    known = [(row, entry) for row in all_rows for entry in shared.shared([row])]
    return [forecast(row, [other for _, other in known if other is not entry]) for row, entry in known]


def figures(found: list[Forecast], failures: list[Forecast]) -> dict[str, Any]:
    """The figures of the module's docstring, with the number of rows behind each."""
    times = [_factor(one.time_factor) for one in found if one.time_factor is not None and not one.row.why_untimed]
    memory = [abs(one.memory_error) for one in found if one.memory_error is not None and not one.row.differs]
    cards = [_factor(factor) for factor in relative.factors().values()]
    if not times or not memory:
        raise InputError("no row of this file can be compared", where="--rows", hint=f"take rows like those of {rows.OWN}")
    return {
        "time_median_factor": round(statistics.median(times), 3), "time_90_percent_factor": round(sorted(times)[int(0.9 * (len(times) - 1))], 3),
        "time_worst_factor": round(max(times), 3), "time_rows": len(times),
        "memory_median_error_percent": round(100 * statistics.median(memory), 1), "memory_worst_error_percent": round(100 * max(memory), 1), "memory_rows": len(memory),
        "wrong_fits": sum(one.verdict == "fits" for one in failures), "tight": sum(one.verdict == "tight" for one in (*found, *failures)),
        "refused_though_it_ran": sum(one.verdict == "does not fit" for one in found),
        "relative_median_factor": round(statistics.median(cards), 3), "relative_worst_factor": round(max(cards), 3), "relative_cards": len(cards),
    }  # fmt: skip


def _factor(ratio: float) -> float:
    return math.exp(abs(math.log(ratio)))


def table(found: list[Forecast]) -> Table:
    """A line for each row."""
    drawn = Table("row", "tokens", "tokens/s", "planned", "x", "GB", "planned", "", title="planned against published", title_justify="left")
    for one in found:
        row = one.row
        cells = [
            row.name,
            str(row.tokens),
            _number(row.tokens_per_s),
            _number(one.tokens_per_s),
            _number(one.time_factor, 2),
            _number(row.memory_gb, 1),
            _number(one.memory_gb, 1),
        ]
        drawn.add_row(*cells, "; ".join(filter(None, (one.refused, row.why_untimed, row.differs))))
    return drawn


def _number(value: float | None, digits: int = 0) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def main() -> int:
    """Compare, print, write. Returns 0; 2 for a file that cannot be read."""
    parser = argparse.ArgumentParser(description="plans against published measurements")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and every row here")
    parser.add_argument("--rows", type=Path, default=rows.OWN, metavar="FILE", help="rows of another file")
    given = parser.parse_args()
    try:
        found = [forecast(row) for row in rows.read(given.rows)]
        failures = [forecast(row) for row in outcomes.out_of_memory()]
        summary = figures(found, failures)
        again = [_factor(one.time_factor) for one in told([one.row for one in found]) if one.time_factor is not None]
        summary["told_median_factor"] = round(statistics.median(again), 3) if again else None
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    raw = [
        {
            "row": one.row.name, "tokens": one.row.tokens, "time_factor": one.time_factor, "memory_error": one.memory_error, "verdict": one.verdict,
            "why_untimed": one.row.why_untimed, "differs": one.row.differs,
        }
        for one in (*found, *failures)
    ]  # fmt: skip
    Console().print(table([*found, *failures]))
    print(LEFT_OUT)
    report.finish("foresight", summary, raw, [], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
