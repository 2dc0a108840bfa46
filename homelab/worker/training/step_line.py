"""The line of a finished step in metrics.jsonl."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from homelab.shared.law import order
from homelab.worker.runtime.metrics_recorder import peak_memory_bytes, perplexity

if TYPE_CHECKING:
    from homelab.worker.data.batches import StepItem
    from homelab.worker.training.trainer import ShareTrainer


def of(trainer: ShareTrainer, item: StepItem) -> dict[str, Any]:
    """What this rank has measured in the step `item`; the loss and the norm of the gradient are those of the whole batch, the same on every rank."""
    task, clock, batches, step_s = trainer.task, trainer.clock, trainer.train_dataset, trainer.step_s
    per_epoch = order.steps_per_epoch(len(batches.rows), batches.global_batch)
    return {
        "rank": task.rank,
        "node": task.node,
        "step": item.step + 1,
        "epoch": item.epoch + (item.step % per_epoch + 1) / per_epoch,
        "loss": trainer.step_loss,
        "perplexity": perplexity(trainer.step_loss) if task.objective is None else None,
        **trainer.pairs,
        "learning_rate": trainer.learning_rate,
        "grad_norm": trainer.grad_norm if math.isfinite(trainer.grad_norm) else None,
        "tokens": item.input_tokens,
        "samples": len(item.sources),
        "tokens_per_s": item.input_tokens / step_s,
        "compute_s": step_s - clock.communication_s,
        "communication_s": clock.communication_s,
        "input_s": clock.input_s,
        "step_s": step_s,
        "memory_bytes": peak_memory_bytes(task.device),
        "share": item.rows if batches.balance.measured else task.shares[task.rank],
        "sent_bytes": trainer.strategy.sent_bytes,
    }
