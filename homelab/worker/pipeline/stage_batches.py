"""The items of a stage: the micro-batches of the whole global batch, of which only the first stage says that they are its own."""

from __future__ import annotations

import dataclasses

from homelab.law.stage import Stage
from homelab.worker.data.batches import StepBatches, StepItem


class StageBatches(StepBatches):
    """`StepBatches` of rank 0, to which a pipeline gives all rows. Data rows count once, on the first stage; tokens count by what each computes of them."""

    stage: Stage

    def __getitem__(self, step: int) -> StepItem:
        item = super().__getitem__(step)
        return dataclasses.replace(item, sources=item.sources if self.stage.is_first else [], input_tokens=round(item.input_tokens * self.stage.work))
