"""Ranks of a run that is forged: each trains on other rows in one step, or in two, and its record says what the recipe demands.

Step 3 has another row in place of its first, or has the rows of step 4 while step 4 has its own. Tests start it as the ranks' `main`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from homelab.shared.law import order
from homelab.worker.data.batches import StepBatches
from homelab.worker.training.train import main

FORGED_STEP = int(os.environ.get("FORGED_STEP", "3"))


def one_row() -> int:
    """In the forged step, one row stands in place of another one."""
    honest = order.step_rows

    def step_rows(step: int, **how: Any) -> tuple[int, tuple[int, ...]]:
        epoch, rows = honest(step, **how)
        if step + 1 != FORGED_STEP:
            return epoch, rows
        other = next(row for row in range(how["count"]) if row not in rows)
        return epoch, (other, *rows[1:])

    return _forged(step_rows)


def two_steps() -> int:
    """The forged step and the one after it are done in the other order."""
    honest = order.step_rows

    def step_rows(step: int, **how: Any) -> tuple[int, tuple[int, ...]]:
        return honest({FORGED_STEP: step + 1, FORGED_STEP + 1: step - 1}.get(step + 1, step), **how)

    return _forged(step_rows)


def _forged(step_rows: Any) -> int:
    honest, item_of = order.step_rows, StepBatches.__getitem__

    def forged(batches: StepBatches, step: int) -> Any:
        said = item_of(batches, step)
        order.step_rows = step_rows
        try:
            done = item_of(batches, step)
        finally:
            order.step_rows = honest
        return dataclasses.replace(done, batch=said.batch, step=said.step, epoch=said.epoch)

    StepBatches.__getitem__ = forged
    return main()
