"""One run of a cell as it is kept, and a cell as the sum of its runs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

from homelab.controller.base.models import Value
from homelab.controller.features.bench.cell import ALONE, Cell
from homelab.controller.features.bench.measurement import Measurement

State = Literal["done", "failed", "refused"]


class Result(Value):
    """`results/<cell>.<repeat>.json`: it is written once, when the run is over.

    refused: the launch, so that repeating it changes nothing. `plan_tokens_per_s` is the plan's word before the run, `plan_is_measured` whether
    earlier runs had measured all of it: the speed of each rank, and the wire with this strategy and as many ranks. `tries`: runs that this one took, the disturbed ones too.
    `joules`: of its cards, in the whole run, and over all of its tokens, those of the warm-up too.
    """

    variation: str
    strategy: str
    nodes: tuple[str, ...]
    repeat: int
    state: State
    because: str = ""
    run: str = ""
    tries: int = 1
    measured: Measurement | None = None
    plan_tokens_per_s: float | None = None
    plan_is_measured: bool = False
    devices: dict[str, str] = {}
    versions: dict[str, str] = {}
    joules: float | None = None
    joules_per_token: float | None = None
    precision: str = ""
    ended_at: float = 0.0

    @property
    def cell(self) -> Cell:
        """The cell that this is a run of."""
        return Cell(self.variation, self.strategy, self.nodes)


class Summary(Value):
    """A cell over its runs: medians, and lowest and highest. `efficiency`: tokens/s over the sum of what its nodes do alone.

    `plan_error`: the plans that were made from measured speeds, over what came: the median of the runs; `plan_error_most`: the run that is furthest off.
    """

    variation: str
    strategy: str
    nodes: tuple[str, ...]
    runs: int
    because: str = ""
    tokens_per_s: float | None = None
    tokens_per_s_low: float | None = None
    tokens_per_s_high: float | None = None
    step_s: float | None = None
    compute: float | None = None
    wire: float | None = None
    wait: float | None = None
    input: float | None = None
    memory_bytes: int | None = None
    loss: float | None = None
    efficiency: float | None = None
    plan_tokens_per_s: float | None = None
    plan_error: float | None = None
    plan_error_most: float | None = None

    @property
    def cell(self) -> Cell:
        """The cell."""
        return Cell(self.variation, self.strategy, self.nodes)

    @property
    def spread(self) -> float | None:
        """Highest less lowest, over the median; None for fewer than two runs."""
        if self.runs < 2 or self.tokens_per_s is None or self.tokens_per_s_low is None or self.tokens_per_s_high is None:
            return None
        return (self.tokens_per_s_high - self.tokens_per_s_low) / self.tokens_per_s


def summaries(cells: Sequence[Cell], results: Iterable[Result]) -> tuple[Summary, ...]:
    """One for each cell, in their order."""
    of_cell: dict[Cell, list[Result]] = {cell: [] for cell in cells}
    for result in results:
        of_cell.get(result.cell, []).append(result)
    alone = {
        (cell.variation, cell.nodes[0]): speed
        for cell, runs in of_cell.items() if cell.strategy == ALONE and (speed := _median([run.measured.tokens_per_s for run in runs if run.measured]))
    }  # fmt: skip
    return tuple(_summary(cell, runs, [alone.get((cell.variation, node)) for node in cell.nodes]) for cell, runs in of_cell.items())


def _summary(cell: Cell, runs: Sequence[Result], alone: Sequence[float | None]) -> Summary:
    measured = [run.measured for run in runs if run.measured is not None]
    because = next((run.because for run in runs if run.state != "done"), "" if runs else "not run yet")
    blank = Summary(variation=cell.variation, strategy=cell.strategy, nodes=cell.nodes, runs=len(measured), because=because)
    if not measured:
        return blank
    speeds = [one.tokens_per_s for one in measured]
    speed = statistics.median(speeds)
    known = [part for part in alone if part is not None]
    planned = [
        (run.plan_tokens_per_s, run.measured.tokens_per_s)
        for run in runs
        if run.measured and run.plan_is_measured and run.plan_tokens_per_s
    ]
    return blank.model_copy(
        update={
            "tokens_per_s": speed, "tokens_per_s_low": min(speeds), "tokens_per_s_high": max(speeds),
            "step_s": _median([one.step_s for one in measured]), "compute": _median([one.compute for one in measured]),
            "wire": _median([one.wire for one in measured]), "wait": _median([one.wait for one in measured]),
            "input": _median([one.input for one in measured if one.input is not None]),
            "memory_bytes": max((size for one in measured for size in one.memory_bytes.values()), default=None),
            "loss": measured[-1].loss, "efficiency": speed / sum(known) if known and len(known) == len(cell.nodes) else None,
            "plan_tokens_per_s": planned[-1][0] if planned else None,
            "plan_error": _median([plan / came - 1 for plan, came in planned]),
            "plan_error_most": max((plan / came - 1 for plan, came in planned), key=abs, default=None),
        }
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
