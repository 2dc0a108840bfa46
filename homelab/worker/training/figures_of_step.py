"""What the ranks tell each other after the passes of a step: the small collective that makes the step count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from homelab.shared.law.checkpoint_interval import NUMBERS
from homelab.worker.balancing.balancer import REPORT_NUMBERS, Report
from homelab.worker.errors import TrainingError


class Figures(NamedTuple):
    """What a rank tells the others after its passes of a step, as numbers in one collective.

    `counted`: tokens with loss in its own rows, or pairs; `expected`: in the whole batch. `waited_s`: for communication, in the step before. `since_save`: as
    `Interval.numbers` gives them. `lead`, `better`: of its own pairs, summed (`PairFigures.take`); 0 without an objective.
    """

    loss: float
    counted: int
    expected: int
    waited_s: float
    since_save: list[float]
    report: Report | None
    lead: float = 0.0
    better: float = 0.0

    def numbers(self) -> list[float]:
        return [*self[:4], self.lead, self.better, *self.since_save, *(self.report.numbers() if self.report else [0.0] * REPORT_NUMBERS)]

    @classmethod
    def of(cls, numbers: list[float]) -> Figures:
        loss, counted, expected, waited_s, lead, better, *rest = numbers
        return cls(loss, int(counted), int(expected), waited_s, rest[:NUMBERS], Report.of(rest[NUMBERS:]), lead, better)


def refuse_other_batch(everyone: Sequence[Figures], *, step: int, rank: int) -> None:
    """All ranks must have made the same global batch, and their parts must be the whole of it. Raises TrainingError."""
    counted, expected = sum(figures.counted for figures in everyone), {figures.expected for figures in everyone}
    if expected != {counted}:
        expected_counts = ", ".join(str(tokens) for tokens in sorted(expected))
        raise TrainingError(
            f"the ranks do not train on the same global batch: {counted} tokens with loss instead of {expected_counts}",
            where=f"step {step}, rank {rank}",
            hint="the nodes hold different data or tokenizers: compare the files in run.json, then launch again",
        )
