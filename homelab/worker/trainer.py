"""The Hugging Face Trainer, taught uneven shares. What it changes, and why the result is the same on any cluster:

    get_train_dataloader  one item = this rank's micro-batches of one optimizer step; never prepared by accelerate, which would
                          shard it again. The run is one Trainer epoch of max_steps items, so resuming is skipping items.
    get_batch_samples     the tokens that carry loss over all micro-batches and all ranks, which every rank can count by itself
    training_step         all micro-batches, gradients synchronised only in the last; one more collective for losses, counts and speeds

The model divides each micro-batch's summed cross entropy by that global count (`num_items_in_batch`), `compute_loss` multiplies by
the number of ranks (`average_tokens_across_devices`), DDP averages over ranks: the gradient is the sum over all tokens divided by
their number, whoever computed them. transformers/trainer.py and loss/loss_utils.py of 5.23 are the source; what is relied on is asserted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from homelab.worker import compress, gradient_norm, gradients, learning_rate, optimizer_state
from homelab.worker.balance import Change, Report
from homelab.worker.batches import StepBatches, StepItem, copied, loss_tokens
from homelab.worker.clock import StepClock
from homelab.worker.errors import TrainingError, WorkerError
from homelab.worker.interval import NUMBERS, Interval
from homelab.worker.meter import Meter
from homelab.worker.task import Task
from homelab.worker.wrapping import Wrapping


def training_arguments(task: Task, steps: int, note: Callable[[str], None]) -> TrainingArguments:
    """The recipe in the Trainer's words. Logging, saving and evaluating are ours, so all of its own are off."""
    train = task.section("train")
    schedule = "constant_with_warmup" if train["schedule"] == "constant" else train["schedule"]
    optimizer = {"adamw": "adamw_torch"}.get(train["optimizer"], train["optimizer"])
    # Not in fp16: there the kernel itself skips a step with an infinite gradient, and accelerate (optimizer.py, step_was_skipped), which
    # asks whether the optimizer was called, would let the learning rate go on.
    if optimizer == "adamw_torch" and task.device == "cuda" and task.precision != "fp16" and task.switches.fused_adamw:
        optimizer = "adamw_torch_fused"
    if task.device == "cpu" and optimizer == "paged_adamw_8bit":
        note("optimizer: paging needs CUDA; this run uses adamw_8bit, whose results are the same")
        optimizer = "adamw_8bit"
    return TrainingArguments(
        output_dir=str(task.run_dir),
        max_steps=steps,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        learning_rate=learning_rate.scaled(
            train["learning_rate"], train.get("lr_scale", "none"), int(train["global_batch"]), train.get("reference_batch")
        ),
        lr_scheduler_type=schedule,
        warmup_steps=train["warmup_steps"],
        weight_decay=train["weight_decay"],
        max_grad_norm=train["max_grad_norm"],
        optim=optimizer,
        seed=task.seed,
        bf16=task.precision == "bf16",
        fp16=task.precision == "fp16",
        use_cpu=task.device == "cpu",
        average_tokens_across_devices=True,
        ddp_backend=task.plan["backend"] if task.world_size > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
    )


class ShareTrainer(Trainer):
    """Trains this rank's share of every global batch. `after_pass` is called after each of its passes, `after_step` when an
    optimizer step is done, `before_first` before any.
    """

    def __init__(
        self,
        *,
        model: Any,
        args: TrainingArguments,
        batches: StepBatches,
        task: Task,
        interval: Interval,
        before_first: Callable[[ShareTrainer], None],
        after_step: Callable[[ShareTrainer], None],
        after_pass: Callable[[], None],
        load_weights: Callable[[Any, Path], None],
    ) -> None:
        self.task = task
        self.after_pass = after_pass
        self.interval = interval
        self.clock = StepClock(task.device)
        self.reduction = compress.reduction_for(task, len(batches))
        self.load_weights = load_weights
        self.item: StepItem | None = None
        self.meter = Meter(None if batches.balance.guessed else batches.balance.speeds[task.rank])
        self.reports: list[Report | None] = []
        self.change: Change | None = None
        self.sync_s: deque[float] = deque(maxlen=100)
        self._waited_s = 0.0
        self.step_s = math.nan
        self.step_loss = math.nan
        self.grad_norm = math.nan
        self.learning_rate = math.nan
        for name in (
            "_clip_grad_norm", "_load_from_checkpoint", "get_batch_samples", "_prepare_for_training", "_load_optimizer_and_scheduler",
        ):  # fmt: skip
            assert hasattr(Trainer, name), f"this transformers has no Trainer.{name}: the worker needs another version"
        super().__init__(
            model=model, args=args, train_dataset=batches, callbacks=[_Steps(self, before_first, after_step)]
        )
        self.remove_callback(PrinterCallback)
        if not self.model_accepts_loss_kwargs:
            raise WorkerError(
                f"{type(model).__name__} does not take num_items_in_batch: its loss would be averaged per rank, not per token",
                where="[model] name in the recipe",
                hint="train it on one node, or use a model class of transformers whose forward takes loss kwargs",
            )
        assert self.args.world_size == task.world_size, (self.args.world_size, task.world_size)
        assert self.args.average_tokens_across_devices or task.world_size == 1
        assert self.args.n_gpu <= 1 and self.args.gradient_accumulation_steps == 1

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.accelerator.ddp_handler is not None:
            # Gradients live in DDP's buckets instead of beside them: one copy of the gradient less (`gradients`).
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
            self.accelerator.ddp_handler = Wrapping.of(self.accelerator.ddp_handler)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=1, shuffle=False, collate_fn=_single, num_workers=0)

    def get_batch_samples(
        self, epoch_iterator: Iterator[StepItem], num_batches: int, device: torch.device
    ) -> tuple[list[StepItem], torch.Tensor]:
        assert num_batches == 1
        self.clock.begin()
        item = next(epoch_iterator)
        self.item = item
        # Every rank has all rows and counts the whole batch by itself; that they agree is seen with the losses, before the
        # weights are touched. A batch without any such token has a loss of 0 and a gradient of 0, not 0 / 0.
        count = torch.tensor(max(item.loss_tokens, 1), device=device)
        if device.type == "cuda" and self.task.switches.copy_ahead:
            item = dataclasses.replace(item, micro_batches=copied(item.micro_batches, device, pin=True))
        return [item], count

    def training_step(
        self, model: Any, inputs: StepItem, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        summed = torch.zeros((), dtype=torch.float64, device=self.args.device)
        last = len(inputs.micro_batches) - 1
        for index, (batch, seed) in enumerate(zip(inputs.micro_batches, inputs.seeds, strict=True)):
            torch.manual_seed(seed)
            sync = contextlib.nullcontext() if index == last else self.accelerator.no_sync(model)
            with self.clock.one_pass(), sync:
                loss = super().training_step(model, batch, num_items_in_batch)
            summed += loss.detach()
            self.clock.keep_up()
            self.after_pass()
        self.clock.gradients_reduced()
        # Each loss was multiplied by the number of ranks, for DDP to divide it again.
        assert self.item is not None
        counted = sum(loss_tokens(batch) for batch in self.item.micro_batches)  # on the CPU: a card would have to be waited for
        mine = [float(summed) / self.accelerator.num_processes, counted, inputs.loss_tokens, self._waited_s]
        since_save = self.interval.numbers(time.perf_counter(), self.step_s)
        everyone = self.clock.gather([*mine, *since_save, *self._report(inputs)])
        self._check_batch([int(values[1]) for values in everyone], [int(values[2]) for values in everyone])
        losses = [values[0] for values in everyone]
        self.interval.update([values[4 : 4 + NUMBERS] for values in everyone])
        self.reports = [Report.of(values[4 + NUMBERS :]) for values in everyone]
        self.change = self.train_dataset.balance.update(self.reports)
        if self.state.global_step > self.task.resume_step + 1:  # the last step's: the first one pays for connecting
            self.sync_s.append(min(values[3] for values in everyone))
        self.step_loss = sum(losses)
        bad = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
        if bad:
            raise self.not_a_number("the loss", bad)
        return summed.to(torch.float32)

    def _check_batch(self, counted: list[int], expected: list[int]) -> None:
        """All ranks must have made the same global batch, and their parts must be the whole of it."""
        if set(expected) != {sum(counted)}:
            assert self.item is not None
            wanted = ", ".join(str(tokens) for tokens in sorted(set(expected)))
            raise TrainingError(
                f"the ranks do not train on the same global batch: {sum(counted)} tokens with loss instead of {wanted}",
                where=f"step {self.item.step + 1}, rank {self.task.rank}",
                hint="the nodes hold different data or tokenizers: compare the files named in run.json, then launch again",
            )

    def _report(self, item: StepItem) -> list[float]:
        """This rank's speed and how this step compares with what was believed of it, for the others."""
        speed = self.meter.speed
        if speed is None:
            return [0.0] * 7
        tokens = item.pass_tokens or [batch["input_ids"].numel() for batch in item.micro_batches]
        told = self.train_dataset.balance.told[self.task.rank]
        return Report(speed, sum(tokens), told.seconds(tokens), speed.seconds(tokens), self.meter.noise).numbers()

    def step_done(self) -> None:
        """The optimizer has stepped: what this step cost, for the next one's report."""
        assert self.item is not None
        passes_s = self.clock.passes_s
        self.step_s = time.perf_counter() - self.clock.started
        self._waited_s = self.clock.communication_s
        tokens = self.item.pass_tokens
        rest_s = self.step_s - self.clock.communication_s - sum(passes_s)
        self.meter.observe(list(zip(tokens, passes_s, strict=True)) if tokens else [], rest_s)

    def _clip_grad_norm(self, model: Any) -> float:
        self.accelerator.unscale_gradients()
        self.grad_norm = gradient_norm.clip(model.parameters(), self.args.max_grad_norm)
        # With fp16 the scaler meets infinities on purpose, and skips those steps.
        if not math.isfinite(self.grad_norm) and self.task.precision != "fp16":
            raise self.not_a_number("the gradient", list(range(self.task.world_size)))
        return self.grad_norm

    def not_a_number(self, what: str, bad: list[int]) -> TrainingError:
        """The error for a loss or gradient that is NaN or infinite on the ranks `bad`. Raised before the weights are touched."""
        assert self.item is not None
        nodes = {entry["rank"]: entry["node"] for entry in self.task.plan["ranks"]}
        places = ", ".join(f"rank {rank} ({nodes[rank]})" for rank in bad)
        mine = f"; this rank's rows: {sorted(self.item.sources)[:20]}" if self.task.rank in bad else ""
        return TrainingError(
            f"{what} is not a number in step {self.item.step + 1} on {places}",
            where=f"step {self.item.step + 1}, {places}{mine}",
            hint="lower [train] learning_rate, add warmup_steps, or look at those rows; the last checkpoint is kept",
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[Any, DataLoader]:
        if self.task.world_size > 1:
            gradients.make(self.model.parameters())
        wrapped, batches = super()._prepare_for_training(*args, **kwargs)
        if isinstance(wrapped, DistributedDataParallel):
            gradients.keep(wrapped)
        return wrapped, batches

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            optimizer_state.load(self.optimizer.optimizer, Path(checkpoint) / "optimizer.pt", self.args.device)
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the Trainer would look for input_ids in our items; nothing here uses the figure

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))


class _Steps(TrainerCallback):
    """The Trainer's public hooks for what happens around a step."""

    def __init__(
        self,
        trainer: ShareTrainer,
        before_first: Callable[[ShareTrainer], None],
        after_step: Callable[[ShareTrainer], None],
    ) -> None:
        self.trainer = trainer
        self.before_first = before_first
        self.after_step = after_step

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        if isinstance(self.trainer.model_wrapped, DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(self.trainer.reduction, self.trainer.clock.reduce_hook)
        check_loss_is_a_sum(self.trainer.model, self.trainer.args.device)
        if self.trainer.train_dataset.packed and not self.trainer.train_dataset.form.joined:
            check_samples_stay_apart(self.trainer.model, self.trainer.args.device)
        self.before_first(self.trainer)

    def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        self.trainer.learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.trainer.step_done()
        self.after_step(self.trainer)


def check_loss_is_a_sum(model: Any, device: torch.device) -> None:
    """Two tiny forward passes: a loss over twice the items must be half. A model can take `num_items_in_batch` and ignore it."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    model.eval()
    with torch.no_grad():
        one, two = (
            float(model(input_ids=tokens, labels=tokens, num_items_in_batch=torch.tensor(count, device=device)).loss)
            for count in (1, 2)
        )
    if math.isfinite(one) and abs(one - 2 * two) > 1e-3 * abs(one):
        raise WorkerError(
            f"{type(model).__name__} ignores num_items_in_batch: its loss would be averaged per rank, not per token",
            where="[model] name in the recipe",
            hint="train it on one node, or use a model class of transformers that divides its loss by num_items_in_batch",
        )


def check_samples_stay_apart(model: Any, device: torch.device) -> None:
    """Change a token of the first of two packed samples: the second must not notice, to the last bit."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    other = tokens.clone()
    other[0, 1] += 5
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=ids, position_ids=positions).logits[0, 4:] for ids in (tokens, other))
    if not torch.equal(before, after):
        raise WorkerError(
            f"{type(model).__name__} lets packed samples see each other",
            where="[data] packing in the recipe",
            hint="set packing = false: this model does not read sample ends from position ids",
        )


def _single(items: list[StepItem]) -> StepItem:
    (item,) = items
    return item
