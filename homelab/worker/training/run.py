"""The training of one rank: load, train, evaluate, save, finish."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from homelab.shared.law import early_stopping, order
from homelab.shared.protocol import phases, profile_files
from homelab.worker.checkpoints import fencing, held, record_start
from homelab.worker.checkpoints.best_weights import BestWeights
from homelab.worker.checkpoints.curves import Curves, keep_before
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task
from homelab.worker.training import step_line
from homelab.worker.training.recomputed import Recomputed
from homelab.worker.training.tensorboard import TensorBoard

if TYPE_CHECKING:
    from homelab.worker.data.rows import EncodedData, Row
    from homelab.worker.model.row_limits import RowLimits
    from homelab.worker.strategies.base import Strategy
    from homelab.worker.training.checkpointing import Checkpointing
    from homelab.worker.training.trainer import ShareTrainer


class _NoLongerBetter(Exception):
    """The held-out loss no longer falls: it ends the loop of the Trainer, also before its first step."""


class Run:
    """The training of one rank, in the order in which it happens."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        self.task = task
        self.recorder = recorder
        self.balance = task.balance()
        self.held_out: list[Row] = []
        self.strategy: Strategy
        self.tokenizer: Any = None
        self.limits: RowLimits
        self.tensorboard: TensorBoard | None = None
        self.curves: Curves
        self.best: BestWeights
        self.checkpointing: Checkpointing
        self.evaluate_s: float | None = None
        self.window = Recomputed(task)
        self.balance.recorded = self.window.recorded_passes
        self.end_profile: Callable[[], None] | None = None

    def go(self) -> None:
        """Load, train, write final/. Raises WorkerError for what a user can fix."""
        task, recorder = self.task, self.recorder
        recorder.heartbeat(phases.LOADING)
        from homelab.worker.checkpoints import broadcast, weights
        from homelab.worker.data import row_agreement
        from homelab.worker.model import row_limits, weight_digests
        from homelab.worker.model.build import load_model, refuse_unfit
        from homelab.worker.model.pretrained import model_path
        from homelab.worker.runtime import process_group
        from homelab.worker.strategies.registry import strategy_of
        from homelab.worker.training.checkpointing import Checkpointing

        imports.quiet()
        process_group.host(task)
        if task.is_keeper:
            held.clear(task.checkpoints_dir)
        self.window.take_checkpoint()
        fault = broadcast.verify_own(task)
        path = model_path(task.run)
        refuse_unfit(task, path)
        data = self._load_data(path)
        process_group.claim_device(task)
        self.strategy = strategy_of(task, recorder.total_steps)
        with weight_digests.noting_sources():
            model = load_model(task, path, recorder.note, self.strategy.part)
        weights.begin_with(model, task, recorder.note, is_stage=self.strategy.part.is_stage)
        self.limits = row_limits.of(model)
        row_limits.refuse(self.limits, itertools.chain(data.train, data.held_out), self.tokenizer, path)
        is_joined = self._connect(model)
        resume = broadcast.fetch(task, fault, recorder)
        rows = row_agreement.of(data)
        row_agreement.refuse_other(rows, task, resume)
        self.curves = Curves.of_all(resume, task)
        self.curves.start(record_start.facts_of(task, rows))
        keep_before(task, self.curves)
        self.best = BestWeights(task, self.curves, resume)
        self.checkpointing = Checkpointing(task, recorder, self.curves, self.best, rows)
        if task.rank == 0 and task.tracking.tensorboard:
            self.tensorboard = TensorBoard(task.run_dir / "tensorboard", self.curves, task.resume_step)
        trainer = self._trainer(model, data.train, is_joined)
        gc.freeze()  # the Trainer collects before its first step, and would look at all that was imported: a sixth of a second and more
        try:
            trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        except _NoLongerBetter:
            pass
        except WorkerError:
            raise
        except Exception:  # a peer that is lost, no memory for a pass: the steps before it need not be done again
            self.checkpointing.parting.at_fault()
            raise
        self._finish(trainer)
        process_group.disconnect()

    def _load_data(self, path: str) -> EncodedData:
        """Tokenizer and rows; the recorder knows the number of steps then."""
        from homelab.worker.data import compared_answers, encoding, row_cache, template_clock
        from homelab.worker.model.pretrained import load_tokenizer

        task, recorder = self.task, self.recorder
        self.tokenizer = load_tokenizer(task.run, path)
        kept_at = row_cache.file_of(task, path)
        data = row_cache.load(kept_at) if kept_at is not None else None
        if data is None:
            data = encoding.load_data(task.run, self.tokenizer, task.node)
            if kept_at is not None and task.is_keeper and template_clock.note_of(self.tokenizer) is None:
                row_cache.keep(kept_at, data)
        for part in (data.train, data.held_out) if task.objective is not None and task.objective.learns_labels else ():
            compared_answers.fill_others(part, task.train.seed, task.train.seq_len)
        self.held_out = data.held_out
        for note in (*data.notes, template_clock.note_of(self.tokenizer)):
            if note:
                recorder.note(note)
        recorder.total_steps = task.train.total_steps(len(data.train))
        per_epoch = order.steps_per_epoch(len(data.train), task.train.global_batch)
        recorder.step_tokens = sum(len(row.tokens) for row in data.train) / per_epoch
        return data

    def _connect(self, model: Any) -> bool:
        """Join the process group; whether the rows of a pass stand one after the other without padding. All ranks pad where one must."""
        from homelab.worker.model import packed_attention, pretrained
        from homelab.worker.runtime import process_group

        device, dtype = next(model.parameters()).device, pretrained.DTYPES[self.task.precision]
        # One rank that cannot take joined rows is enough for all to pad: who gets which rows depends on it.
        why_padded = packed_attention.use(model, device, dtype) if self.task.switches.joined_rows else "the plan says so"
        self.recorder.heartbeat(phases.CONNECTING)
        process_group.connect(self.task)
        self.recorder.heartbeat(phases.LOADING)
        is_joined = not any(values[0] for values in process_group.gather([float(why_padded is not None)]))
        if is_joined:
            self.balance.join_rows()
        elif why_padded is None:
            packed_attention.leave(model)
        else:
            self.recorder.note(f"rows of different length are padded: {why_padded}")
        return is_joined

    def _trainer(self, model: Any, rows: list[Row], is_joined: bool) -> ShareTrainer:
        from homelab.worker.data.batches import Form
        from homelab.worker.model import fused_loss, row_limits
        from homelab.worker.training.arguments import training_arguments
        from homelab.worker.training.trainer import Hooks, ShareTrainer

        task, steps, strategy = self.task, self.recorder.total_steps, self.strategy
        form = Form(row_limits.padding_id(self.tokenizer, self.limits.ids), is_joined, fused_loss.takes_labelled(model), task.objective)
        batches = strategy.batches(rows, steps=steps, balance=self.balance, form=form)
        return ShareTrainer(
            model=model,
            args=training_arguments(task, steps, strategy.arguments(), self.recorder.note),
            batches=batches,
            task=task,
            strategy=strategy,
            interval=self.checkpointing.interval,
            hooks=Hooks(
                self._before_first, self.recorder.sign, self._before_vote, self.checkpointing.parting.begin_change, self._after_step
            ),
        )

    def _before_first(self, trainer: ShareTrainer) -> None:
        """Everything is loaded and wrapped; no step is done yet in this attempt."""
        from homelab.worker.runtime import process_group
        from homelab.worker.training import reference_pass

        # Disks of different speed deliver the optimizer's state, and the first collective is in the first step.
        process_group.wait_for_all("prepared", self.task.world_size)
        begin = self.task.resume_step
        if difference := trainer.strategy.check_start(trainer.model, f"step {begin}, seen on node {self.task.node}"):
            self.recorder.note(difference)
        reference_pass.fill(trainer, [*trainer.train_dataset.rows, *self.held_out], self.recorder)
        # A checkpoint is saved before the evaluation after the same step: a fault between them must not leave a hole in the curve.
        if begin not in self.curves.eval_losses and self._evaluates_after(begin):
            self._evaluate(trainer, begin)
        self._stop_early(begin)
        self.window.begin(trainer)
        self.checkpointing.begin(trainer)
        if profile_files.REQUEST in self.task.run:
            from homelab.worker.profiling.install import install

            self.end_profile = install(trainer, self.task, self.recorder)
        self.recorder.heartbeat(phases.TRAINING)

    def _before_vote(self, trainer: ShareTrainer) -> None:
        item = trainer.item
        assert item is not None
        self.recorder.samples({"step": item.step + 1, "epoch": item.epoch, "ids": item.sources})

    def _after_step(self, trainer: ShareTrainer) -> None:
        """An optimizer step is done: write it down, then save and evaluate when it is time."""
        from homelab.worker.training import speed_profile

        step = self.recorder.step = trainer.state.global_step
        self._record(trainer, step)
        self.checkpointing.step_is_whole()
        if trainer.change and self.task.rank == 0:
            self.recorder.shares(step, trainer.change)
        if self.checkpointing.after_step(trainer, step, last=step == self.recorder.total_steps):
            save_s, evaluate_s = self.checkpointing.interval.own_stall_s, self.evaluate_s if self.held_out else None
            speed_profile.keep(self.task, trainer, self.recorder, save_s, evaluate_s)
        if self._evaluates_after(step):
            self._evaluate(trainer, step)
        self._stop_early(step)
        self.recorder.heartbeat(phases.TRAINING)

    def _evaluates_after(self, step: int) -> bool:
        every = self.task.tracking.eval_every_steps
        return not self.window.is_asked and (step in (0, self.recorder.total_steps) or (every > 0 and step % every == 0))

    def _record(self, trainer: ShareTrainer, step: int) -> None:
        item = trainer.item
        assert item is not None and item.step == step - 1, "the order of the steps is the law"
        line = step_line.of(trainer, item)
        self.recorder.train(line)
        self.curves.train(line | {"batch": item.batch, "passes": item.passes}, time.time())
        if self.tensorboard:
            names = ("loss", "perplexity", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "communication_s", *trainer.pairs)
            self.tensorboard.write(step, {f"train/{name}": line[name] for name in names})

    def _evaluate(self, trainer: ShareTrainer, step: int) -> None:
        """The mean loss per token over the held-out rows, the same number on every rank."""
        if not self.held_out:
            return
        start_s = time.perf_counter()
        self.recorder.heartbeat(phases.EVALUATING)
        from homelab.worker.runtime import process_group
        from homelab.worker.training.evaluate import EvaluationHooks, held_out_loss

        world_size = self.task.world_size
        hooks = EvaluationHooks(trainer.strategy, self.recorder.sign, lambda: process_group.wait_for_all(f"evaluated/{step}", world_size))
        loss, pairs = held_out_loss(trainer.model, self.held_out, self.balance, self.task.rank, trainer.train_dataset.form, hooks)
        with self.checkpointing.parting.changing() if trainer.strategy.saves_alone else contextlib.nullcontext():
            self.curves.evaluation(step, loss, time.time())
            self.best.evaluated(step, lambda: trainer.strategy.whole_weights(trainer.model))
        if self.task.rank == 0:
            figures = self.recorder.evaluation(step, loss, pairs)
            if self.tensorboard:
                self.tensorboard.write(step, {name.replace("_", "/", 1): value for name, value in figures.items()})
        self.evaluate_s = time.perf_counter() - start_s

    def _stop_early(self, step: int) -> None:
        """End the loop where [train] early_stopping says so. Every rank has the same losses."""
        why = self.window.why_over(step) or early_stopping.why_over(self.curves.eval_losses, self.task.train.early_stopping)
        if step == self.recorder.total_steps or why is None:
            return
        self.recorder.note(f"stopped after step {step} of {self.recorder.total_steps}: {why}")
        self.recorder.total_steps = step
        self.checkpointing.finish()
        raise _NoLongerBetter

    def _finish(self, trainer: ShareTrainer) -> None:
        """final/ on the head: the adapter or the model, the tokenizer and a model card; then all are done together."""
        from homelab.worker.runtime import process_group

        self.recorder.heartbeat(phases.SAVING)
        if self.end_profile is not None:
            self.end_profile()
        if self.tensorboard:
            self.tensorboard.close()
        self.curves.agree()
        if self.window.is_asked:
            self.window.finish(trainer, self.curves)
        else:
            self._write_final(trainer)
        process_group.wait_for_all("finished", self.task.world_size)
        self.recorder.heartbeat(phases.DONE)  # everything is written; leaving the group comes after it, because that may stall

    def _write_final(self, trainer: ShareTrainer) -> None:
        from homelab.worker.checkpoints.weights import buffers, frozen, write_final

        tensors, is_whole = trainer.strategy.whole_weights(trainer.model), self.task.method.kind == "full"
        rest, beside = (trainer.strategy.whole_weights(trainer.model, part) if is_whole else {} for part in (frozen, buffers))
        if self.task.rank == 0:
            fencing.check(self.task.run_dir, self.task.attempt)
            if self.best.step is not None:
                self.checkpointing.parting.disarm()  # where the whole weights are the model's own
            self.best.load(tensors)
            step = self.best.step or self.recorder.step
            write_final(trainer.model, tensors | rest, beside, self.tokenizer, self.task, self.curves, step)
