"""The recipe in the words of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from homelab.shared.law import learning_rate
from homelab.worker.runtime.task import Task


def training_arguments(task: Task, steps: int, strategy: dict[str, Any], note: Callable[[str], None]) -> TrainingArguments:
    """The Trainer's arguments. `strategy` holds those of the strategy. Logging, saving and evaluating are ours, so the Trainer's are off."""
    train = task.train
    schedule = "constant_with_warmup" if train.schedule == "constant" else train.schedule
    return TrainingArguments(
        output_dir=str(task.run_dir),
        max_steps=steps,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=learning_rate.scaled(train.learning_rate, train.lr_scale, train.global_batch, train.reference_batch),
        lr_scheduler_type=schedule,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        optim=_optimizer(task, train.optimizer, note),
        seed=task.train.seed,
        bf16=task.precision == "bf16",
        fp16=task.precision == "fp16",
        use_cpu=task.device == "cpu",
        average_tokens_across_devices=False,  # strategies sum
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        **strategy,
    )


def _optimizer(task: Task, name: str, note: Callable[[str], None]) -> str:
    """transformers' name of the optimizer."""
    if task.device == "cpu" and name == "paged_adamw_8bit":
        note("optimizer: paging needs CUDA; this run uses adamw_8bit, which has the same results")
        return "adamw_8bit"
    if name != "adamw":
        return name
    is_fused = task.device == "cuda" and task.switches.fused_adamw
    return "adamw_torch_fused" if is_fused else "adamw_torch"
