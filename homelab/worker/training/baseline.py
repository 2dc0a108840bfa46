"""The baseline of judged answers: how far the model has moved on answers to other prompts, over the whole global batch and without a gradient.

It must be known before the first backward pass of a step, so a step has two parts: forward passes over the other rows with one small collective, then its usual
passes. A mean over the rows of one rank alone would be another training on another cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from homelab.worker.data.batches import Batch, Form
from homelab.worker.model import pair_loss
from homelab.worker.strategies.base import Strategy


def measured(
    unmatched: Sequence[Batch],
    rows: int,
    strategy: Strategy,
    model: Any,
    form: Form,
    gather: Callable[[list[float]], list[list[float]]],
    after_pass: Callable[[], None],
) -> float:
    """The mean over `rows` rows that count, of which `unmatched` is this rank's part; at least 0, in nats of an answer. Collective."""
    model.eval()
    with torch.no_grad():
        counting = [batch for batch in unmatched if form.counted(batch)]
        strategy.evaluate(model, counting or [form.stand_in(packed=False)], form, after_pass)
    moved = pair_loss.figures_of(model).take()[2] if strategy.part.has_loss else 0.0
    return max(0.0, sum(values[0] for values in gather([moved])) / max(1, rows))
