"""The Hugging Face Trainer, taught uneven shares. What it changes, and why the result is the same on any cluster:

    get_train_dataloader  one item = this rank's micro-batches of one optimizer step; never prepared by accelerate, which would
                          shard it again. The run is one Trainer epoch of max_steps items, so resuming is skipping items.
    get_batch_samples     the tokens that carry loss over all micro-batches and all ranks, which every rank can count by itself
    training_step         all micro-batches, gradients synchronised only in the last; one more collective for losses, counts and speeds

The model divides each micro-batch's summed cross entropy by that global count (`num_items_in_batch`), and the strategy sums over ranks: the
gradient is the sum over all tokens divided by their number, whichever rank computed them. The Trainer's own way, a loss times the number of ranks
and a mean over them, would let fp16 overflow earlier on more ranks. transformers/trainer.py and loss/loss_utils.py of 5.23 are the source;
assertions check what this relies on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from homelab.shared.law.checkpoint_interval import Interval
from homelab.shared.protocol import window
from homelab.worker.balancing.balancer import Rebalancing, Report
from homelab.worker.balancing.speed_meter import SpeedMeter
from homelab.worker.checkpoints import optimizer_state
from homelab.worker.data import pair_batches
from homelab.worker.data.batches import StepBatches, StepItem, copied
from homelab.worker.errors import TrainingError, WorkerError
from homelab.worker.model import layer_seeds, pair_loss
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.base import Strategy
from homelab.worker.training import baseline, figures_of_step, loss_scale, trainer_members
from homelab.worker.training.figures_of_step import Figures
from homelab.worker.training.model_checks import check_loss_is_a_sum, check_samples_stay_apart


@dataclass(frozen=True)
class Hooks:
    """What is called around the work of a trainer: before the first step, after each forward and backward pass, when all passes of a step are done
    and nothing of it counts yet, before the optimizer steps, and after it."""

    before_first: Callable[[ShareTrainer], None]
    after_pass: Callable[[], None]
    before_vote: Callable[[ShareTrainer], None]
    before_change: Callable[[], None]
    after_step: Callable[[ShareTrainer], None]


class ShareTrainer(Trainer):
    """Trains this rank's share of every global batch."""

    def __init__(
        self, *, model: Any, args: TrainingArguments, batches: StepBatches, task: Task, strategy: Strategy, interval: Interval, hooks: Hooks
    ) -> None:
        self.task = task
        self.strategy = strategy
        self.interval = interval
        self.hooks = hooks
        self.clock = StepTimer(task.device)
        self.item: StepItem | None = None
        self.meter = SpeedMeter(None if batches.balance.is_estimated else batches.balance.speeds[task.rank])
        self.reports: list[Report | None] = []
        self.change: Rebalancing | None = None
        self.sync_s: deque[float] = deque(maxlen=100)
        self.wait_s: deque[float] = deque(maxlen=100)
        self._waited_s = 0.0
        self._baseline_s = 0.0
        self._expected_s = math.nan
        self.step_s = math.nan
        self.step_loss = math.nan
        self.pairs: dict[str, float] = {}
        self.grad_norm = math.nan
        self.learning_rate = math.nan
        trainer_members.refuse_other(Trainer, places_model=self.strategy.places_model)
        super().__init__(model=model, args=args, train_dataset=batches, callbacks=[_Steps(self)])
        self.remove_callback(PrinterCallback)
        if not self.model_accepts_loss_kwargs:
            raise WorkerError(
                f"{type(model).__name__} does not take num_items_in_batch: its loss would be averaged per rank, not per token",
                where="[model] name in the recipe",
                hint="train it on one node, or use a model class of transformers whose forward takes loss kwargs",
            )
        assert self.args.world_size == task.world_size, (self.args.world_size, task.world_size)
        assert not self.args.average_tokens_across_devices
        assert self.args.n_gpu <= 1 and self.args.gradient_accumulation_steps == 1

    @property
    def copies_ahead(self) -> bool:
        """Whether a step's batches are on the card before its passes begin. They must not be copied again: a card's memory cannot be pinned."""
        return self.task.device == "cuda" and self.task.switches.copy_ahead

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.task.precision == "fp16":
            loss_scale.install(self.accelerator)
        self.strategy.configure(self.accelerator)

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        if not self.strategy.divides_on_host(model):
            super()._move_model_to_device(model, device)

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=1, shuffle=False, collate_fn=_single, num_workers=0)

    def get_batch_samples(
        self, epoch_iterator: Iterator[StepItem], num_batches: int, device: torch.device
    ) -> tuple[list[StepItem], torch.Tensor]:
        assert num_batches == 1
        self.clock.begin()
        item = next(epoch_iterator)
        self.item = item
        # Every rank has all rows and counts the whole batch by itself. The ranks exchange the counts with the losses and compare them
        # before they change the weights. A batch without any such token has a loss of 0 and a gradient of 0, not 0 / 0.
        count = torch.tensor(max(item.loss_tokens, 1), device=device)
        if self.copies_ahead:
            item = dataclasses.replace(item, micro_batches=copied(item.micro_batches, device, pin=True))
        self.clock.input_ready()
        return [item], count

    def training_step(self, model: Any, inputs: StepItem, num_items_in_batch: torch.Tensor | int | None = None) -> torch.Tensor:
        kl = self._baseline(inputs)
        inputs = self._with_stand_ins(model, inputs)
        own_loss = self.strategy.run_passes(self, model, inputs, num_items_in_batch)
        # A stage of a pipeline sees the whole batch; the one that counts it has its rows as its own. Counted on the CPU: a tensor on a card would need a wait.
        assert self.item is not None
        counted = sum(map(self.train_dataset.form.counted, self.item.micro_batches)) if self.item.sources else 0
        is_asked = self.task.is_keeper and self.task.save_request.exists()
        since_save = self.interval.numbers(time.perf_counter(), self.step_s, is_asked=is_asked)
        self.hooks.before_vote(self)
        learns_here = self.task.objective is not None and self.strategy.part.has_loss
        lead, better, _ = pair_loss.figures_of(self.model).take() if learns_here else (0.0, 0.0, 0.0)
        own = Figures(own_loss, counted, inputs.loss_tokens, self._waited_s, since_save, self._report(inputs), lead, better)
        everyone = [Figures.of(numbers) for numbers in self.clock.gather(own.numbers())]
        figures_of_step.refuse_other_batch(everyone, step=self.item.step + 1, rank=self.task.rank)
        losses = [figures.loss for figures in everyone]
        self.interval.update([figures.since_save for figures in everyone])
        self.reports = [figures.report for figures in everyone]
        self.change = self.train_dataset.balance.update(self.reports)
        if self.state.global_step > self.task.resume_step + 1:  # the last step's: the first one pays for connecting
            self.sync_s.append(min(figures.waited_s for figures in everyone))
            self.wait_s.append(self.step_s - self._expected_s - self.sync_s[-1])
        self._expected_s = math.nan if None in self.reports else max(report.measured_s for report in self.reports if report)
        self.step_loss = sum(losses)
        if self.task.objective is not None:
            sums = [sum(figures.lead for figures in everyone), sum(figures.better for figures in everyone)]
            self.pairs = {name: value / max(1, inputs.loss_tokens) for name, value in zip(("margin", "accuracy"), sums, strict=True)} | kl
        bad = [rank for rank, value in enumerate(losses) if not math.isfinite(value)]
        if bad:
            raise self.not_a_number("the loss", bad)
        return torch.tensor(own_loss, dtype=torch.float32, device=self.args.device)

    def _baseline(self, item: StepItem) -> dict[str, float]:
        """What judged answers are compared with in this step, put into its batches; as a figure of the step, empty where none is asked for. Collective."""
        form = self.train_dataset.form
        if not form.judges:
            return {}
        began_s, waited_s = time.perf_counter(), self.clock.communication_s
        gather, sign = self.clock.gather, self.hooks.after_pass
        kl = baseline.measured(item.unmatched, item.loss_tokens, self.strategy, self.model, form, gather, sign)
        pair_batches.set_baseline(item.micro_batches, kl)
        self._baseline_s = time.perf_counter() - began_s - (self.clock.communication_s - waited_s)
        return {"kl": kl}

    def own_passes(self, model: Any, inputs: StepItem, num_items_in_batch: torch.Tensor | int | None) -> float:
        """The passes of this rank's micro-batches, gradients synchronised in the last one; their loss."""
        summed = torch.zeros((), dtype=torch.float64, device=self.args.device)
        last = len(inputs.micro_batches) - 1
        for index, (batch, seed) in enumerate(zip(inputs.micro_batches, inputs.seeds, strict=True)):
            layer_seeds.begin(seed)
            sync = contextlib.nullcontext() if index == last else self.strategy.without_reduction(self.accelerator, model)
            with self.clock.one_pass(), sync:
                loss = super().training_step(model, batch, num_items_in_batch)
            summed += loss.detach()
            self.clock.keep_up()
            self.hooks.after_pass()
        self.clock.gradients_reduced()
        return float(summed)

    def _with_stand_ins(self, model: Any, item: StepItem) -> StepItem:
        """The step with as many passes as the strategy wants of this rank."""
        missing = self.strategy.begin_step(model, len(item.micro_batches)) - len(item.micro_batches)
        if missing <= 0:
            return item
        batches = self.train_dataset
        extra = copied([batches.stand_in()] * missing, self.args.device, pin=False)
        return dataclasses.replace(item, micro_batches=[*item.micro_batches, *extra], seeds=[*item.seeds, *[batches.seed] * missing])

    def _report(self, item: StepItem) -> Report | None:
        """This rank's speed and how this step compares with what was believed of it, for the others; None where nothing is measured yet."""
        speed = self.meter.speed
        if speed is None:
            return None
        tokens = item.pass_tokens or [batch["input_ids"].numel() for batch in item.micro_batches]
        announced = self.train_dataset.balance.announced[self.task.rank]
        return Report(speed, sum(tokens), announced.seconds(tokens), speed.seconds(tokens), self.meter.noise)

    def step_done(self) -> None:
        """The optimizer has stepped: what this step cost, for the next one's report."""
        assert self.item is not None
        passes_s = self.clock.passes_s
        self.step_s = time.perf_counter() - self.clock.started
        self._waited_s = self.clock.communication_s
        tokens = self.item.pass_tokens
        rest_s = self.step_s - self.clock.communication_s - sum(passes_s) - self._baseline_s
        own_passes_s = passes_s[: len(tokens)]  # stand-ins come after them
        self.meter.observe(list(zip(tokens, own_passes_s, strict=True)), rest_s)

    def _clip_grad_norm(self, model: Any) -> float:
        self.accelerator.unscale_gradients()
        self.grad_norm = self.strategy.clip(model, self.args.max_grad_norm)
        scale = self.accelerator.scaler
        is_finite = math.isfinite(self.grad_norm) if scale is None else scale.judge(self.grad_norm)
        if not is_finite and (scale is None or scale.get_scale() < 1.0):  # a scale below 1 is at fault no more
            raise self.not_a_number("the gradient", list(range(self.task.world_size)))
        return self.grad_norm

    def not_a_number(self, quantity: str, bad: list[int]) -> TrainingError:
        """The error for a loss or gradient that is NaN or infinite on the ranks `bad`. Raised before the weights are touched."""
        assert self.item is not None
        places = self.task.named(*bad)
        own_rows = f"; this rank's rows: {sorted(self.item.sources)[:20]}" if self.task.rank in bad else ""
        return TrainingError(
            f"{quantity} is not a number in step {self.item.step + 1} on {places}",
            where=f"step {self.item.step + 1}, {places}{own_rows}",
            hint="lower [train] learning_rate, add warmup_steps, or check those rows; the last checkpoint is kept",
            needs_launch=True,
        )

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[Any, DataLoader]:
        self.strategy.before_wrap(self.model)
        self.is_distributed_loading_by_transformers = self.strategy.places_model
        wrapped, batches = super()._prepare_for_training(*args, **kwargs)
        self.strategy.after_wrap(wrapped)
        return wrapped, batches

    def _sync_replicated_trainable_parameters(self, model: Any) -> None:
        pass  # what is trained and no DTensor would become rank 0's, and its gradient an average: it is a stage's own

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # that of a run that is checked must not say how fast is learned
            with optimizer_state.kept_as_made(self.optimizer.optimizer, self.lr_scheduler, is_asked=window.REQUEST in self.task.run):
                self.strategy.load_optimizer(self.optimizer.optimizer, Path(checkpoint), self.args.device)
                self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # the Trainer would look for input_ids in these items; nothing uses the figure

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.strategy.load_weights(self.model if model is None else model, Path(resume_from_checkpoint))


class _Steps(TrainerCallback):
    """The Trainer's public hooks for what happens around a step."""

    def __init__(self, trainer: ShareTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self.trainer.strategy.reduce_gradients(self.trainer.model_wrapped, self.trainer.clock)
        objective = self.trainer.task.objective
        if self.trainer.strategy.part.has_loss:
            check_loss_is_a_sum(self.trainer.model, self.trainer.args.device, scores=objective is not None and objective.scores)
            if objective is not None:
                pair_loss.figures_of(self.trainer.model).take()  # those of the check
        if self.trainer.train_dataset.packed and not self.trainer.train_dataset.form.joined:
            check_samples_stay_apart(self.trainer.model, self.trainer.args.device)
        self.trainer.hooks.before_first(self.trainer)

    def on_pre_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
        self.trainer.learning_rate = float(self.trainer.optimizer.param_groups[0]["lr"])
        self.trainer.hooks.before_change()

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self.trainer.step_done()
        self.trainer.hooks.after_step(self.trainer)


def _single(items: list[StepItem]) -> StepItem:
    (item,) = items
    return item
