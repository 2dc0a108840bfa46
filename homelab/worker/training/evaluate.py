"""The loss over held-out rows, split over the ranks by share and put together exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from homelab.worker.balancing.balancer import Balance
from homelab.worker.data import pair_batches
from homelab.worker.data.batches import Form
from homelab.worker.data.rows import Row
from homelab.worker.errors import TrainingError
from homelab.worker.model import pair_loss
from homelab.worker.runtime import process_group
from homelab.worker.strategies.base import Strategy
from homelab.worker.training import baseline


@dataclass(frozen=True)
class EvaluationHooks:
    """What is called around the passes of an evaluation.

    `strategy` says how many passes each rank makes where they wait for each other, or makes them itself. `wait` is called when this rank
    has finished: the first evaluation is assigned by estimated speeds, and no collective should stay open for minutes.
    """

    strategy: Strategy
    after_pass: Callable[[], None]
    wait: Callable[[], None]


@torch.no_grad()
def held_out_loss(
    model: Any, rows: Sequence[Row], balance: Balance, rank: int, form: Form, hooks: EvaluationHooks
) -> tuple[float, dict[str, float]]:
    """Mean cross entropy per token (nats) over all rows, or mean loss of a pair. Sums and counts are added over ranks, so how the rows are split does not
    matter. The second has the pairs' mean lead ("margin") and the part whose better answer the model finds better ("accuracy"), of judged answers also their
    baseline ("kl"); empty without an objective.

    Collective: every rank calls it. A rank may have no row.
    """
    model.eval()
    of_rank = hooks.strategy.counting_rank
    own_rows = [rows[row] for row in balance.rows_of([row.longer_tokens for row in rows], of_rank)]
    cuts = balance.passes_of([row.longer_tokens for row in own_rows], of_rank)
    # The sum of all passes is divided by the rows that count: also what is a mean over tokens.
    learned = form.learned(rows) / max(1, sum(map(form.count, rows)))
    batches = [form.batch([own_rows[row] for row in cut], packed=False, learned=learned) for cut in cuts]
    batches = [batch for batch in batches if form.counted(batch)]
    counted = sum(map(form.counted, batches)) if rank == of_rank else 0
    kl: dict[str, float] = {}
    if form.judges:
        unmatched = [form.unmatched([own_rows[row] for row in cut]) for cut in cuts]
        counting, gather = sum(map(form.count, rows)), process_group.gather
        kl["kl"] = baseline.measured(unmatched, counting, hooks.strategy, model, form, gather, hooks.after_pass)
        pair_batches.set_baseline(batches, kl["kl"])
    summed = hooks.strategy.evaluate(model, batches, form, hooks.after_pass)
    hooks.wait()
    learns_here = form.objective is not None and hooks.strategy.part.has_loss
    pairs = pair_loss.figures_of(model).take()[:2] if learns_here else (0.0, 0.0)
    everyone = process_group.gather([summed, float(counted), *pairs])
    total, count = (sum(values[part] for values in everyone) for part in (0, 1))
    if count == 0:
        raise TrainingError(
            "no token of the held-out rows carries loss",
            where="[data] eval",
            hint="raise [train] seq_len so that the answers fit"
            + (", or set [data] completion_only = false" if form.objective is None else ""),
            needs_launch=True,
        )
    if not math.isfinite(total):
        bad = [rank for rank, values in enumerate(everyone) if not math.isfinite(values[0])]
        raise TrainingError(
            f"the loss over the held-out rows is not a number on ranks {bad}",
            where="evaluation",
            hint="lower [train] learning_rate, or train in fp32 or bf16; the last checkpoint is kept",
            needs_launch=True,
        )
    if form.objective is None:
        return total / count, {}
    lead, better = (sum(values[part] for values in everyone) for part in (2, 3))
    return total / count, {"margin": lead / count, "accuracy": better / count, **kl}
