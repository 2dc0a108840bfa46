"""The loss over held-out rows, split over the ranks by share and put together exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from homelab.worker import ranks
from homelab.worker.balance import Balance
from homelab.worker.batches import Form, copied, loss_tokens
from homelab.worker.data import Row
from homelab.worker.errors import TrainingError


@torch.no_grad()
def held_out_loss(
    model: Any, rows: Sequence[Row], balance: Balance, rank: int, form: Form, device: torch.device, *, after_pass: Callable[[], None],
    wait: Callable[[], None],
) -> float:  # fmt: skip
    """Mean cross entropy per token (nats) over all rows. Sums and counts are added over ranks, so how the rows are split does not matter.

    Collective: every rank calls it. No rank needs a row of its own, as the forward pass itself waits for nobody. `wait` is called when this
    rank is through: the first evaluation is shared out by guessed speeds, and no collective should be held open for minutes.
    """
    model.eval()
    mine = [rows[row] for row in balance.rows_of([len(row.tokens) for row in rows], rank)]
    cuts = balance.passes_of([len(row.tokens) for row in mine], rank)
    summed, counted = 0.0, 0
    for cut in cuts:
        batch = form.batch([mine[row] for row in cut], packed=False)
        tokens = loss_tokens(batch)
        if tokens == 0:
            continue
        (inputs,) = copied([batch], device, pin=device.type == "cuda")
        # num_items_in_batch = 1 makes the model's loss a sum.
        summed += float(model(**inputs, num_items_in_batch=torch.tensor(1, device=device)).loss)
        counted += tokens
        after_pass()
    wait()
    everyone = ranks.gather([summed, float(counted)])
    total, count = (sum(values[part] for values in everyone) for part in (0, 1))
    if count == 0:
        raise TrainingError(
            "no token of the held-out rows carries loss",
            where="[data] eval",
            hint="raise [train] seq_len so that the answers fit, or set [data] completion_only = false",
        )
    if not math.isfinite(total):
        bad = [rank for rank, values in enumerate(everyone) if not math.isfinite(values[0])]
        raise TrainingError(
            f"the loss over the held-out rows is not a number on ranks {bad}",
            where="evaluation",
            hint="lower [train] learning_rate, or train in fp32 or bf16; the last checkpoint is kept",
        )
    return total / count
