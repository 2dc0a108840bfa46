"""The items of a stage: the micro-batches of the whole global batch, of which only the first stage says that they are its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from homelab.shared.law.stage import Stage
from homelab.worker.balancing.balancer import Balance
from homelab.worker.data.batches import Form, StepBatches, StepItem
from homelab.worker.data.encoding import Row
from homelab.worker.runtime.task import Task


class StageBatches(StepBatches):
    """`StepBatches` of rank 0, to which a pipeline gives all rows. Data rows count once, on the first stage; tokens count by what each computes of them."""

    stage: Stage

    def __getitem__(self, step: int) -> StepItem:
        item = super().__getitem__(step)
        return dataclasses.replace(
            item, sources=item.sources if self.stage.is_first else [], input_tokens=round(item.input_tokens * self.stage.work)
        )


def batches_of(task: Task, rows: Sequence[Row], *, steps: int, balance: Balance, form: Form) -> StepBatches:
    """The items of this rank for `steps` optimizer steps: its own rows, or as a stage those of all."""
    rank = task.rank if task.stage is None else task.stage_ranks[0]
    kind = StepBatches if task.stage is None else StageBatches
    batches = kind(rows, seed=task.train.seed, global_batch=task.train.global_batch, steps=steps, balance=balance, rank=rank, form=form)
    if isinstance(batches, StageBatches) and task.stage is not None:
        batches.stage = task.stage
    return batches
