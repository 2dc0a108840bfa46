"""One rank's life: read the task, load, train, evaluate, save, finish. `main` turns what goes wrong into one clear message."""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from homelab.worker import checkpoint, fence, imports, sampler, unsloth
from homelab.worker.curves import Curves, keep_before
from homelab.worker.errors import EXIT_FAILED, WorkerError, first_words
from homelab.worker.interval import LOSS_S, Interval, loses_more
from homelab.worker.metrics import Recorder, peak_memory_bytes, perplexity
from homelab.worker.saving import Saver
from homelab.worker.task import Task, load_task
from homelab.worker.tensorboard import TensorBoard

if TYPE_CHECKING:
    from homelab.worker.data import Row
    from homelab.worker.trainer import ShareTrainer


def main() -> int:
    """Entry of `python -m homelab.worker`. Returns 0 when the run is done, 1 when training went wrong, 2 for wrong input."""
    try:
        task = load_task(os.environ)
    except WorkerError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    recorder = Recorder(task)
    stacks = (task.rank_dir / "stacks.txt").open("w", encoding="utf-8")  # never closed: the question may come at any time
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    try:
        recorder.heartbeat("starting")
        eight_bit = task.section("train")["optimizer"] != "adamw"
        by_unsloth = task.section("method")["backend"] == "unsloth"  # which imports both by itself
        imports.prepare(task.run, bitsandbytes=by_unsloth or eight_bit or task.section("method")["kind"] == "qlora", datasets=by_unsloth)
        if by_unsloth:
            unsloth.begin(task)
        Run(task, recorder).go()
    except WorkerError as error:
        recorder.error(error.as_dict())
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except Exception as error:  # not the user's mistake: a lost peer, no memory left, or a fault of ours
        where = f"step {recorder.step + 1}, rank {task.rank} on {task.node}"
        recorder.error({"message": first_words(error), "where": where, "hint": ""})
        traceback.print_exc()
        return EXIT_FAILED
    return 0


class Run:
    """The training of one rank, in the order in which it happens."""

    def __init__(self, task: Task, recorder: Recorder) -> None:
        self.task = task
        self.recorder = recorder
        self.curves = Curves(task)
        self.compare: Callable[[Any, int], str | None] = lambda model, step: None
        self.held_out: list[Row] = []
        self.tokenizer: Any = None
        self.tensorboard: TensorBoard | None = None
        self.balance = task.balance()
        self.saver = Saver(task, recorder.note)
        self.interval = Interval(task.section("checkpoint").get("every_steps"), _known_save_s(task))
        self.has_told = False
        self.is_saved = task.resume_step > 0  # there is a checkpoint to go on from
        self.evaluate_s: float | None = None

    def go(self) -> None:
        """Load, train, write final/. Raises WorkerError for what a user can mend."""
        task, recorder = self.task, self.recorder
        recorder.heartbeat("loading")
        from homelab.worker import attention, content, copies, digests, fused_loss, ranks, spread
        from homelab.worker.batches import Form, StepBatches
        from homelab.worker.data import load_data
        from homelab.worker.model import load_model, load_tokenizer, model_path
        from homelab.worker.trainer import ShareTrainer, training_arguments
        from homelab.worker.weights import load_weights

        imports.quiet()
        if task.local_rank == 0:
            checkpoint.clear_partial(task.checkpoints_dir)
        fault = spread.look(task)
        path = model_path(task.run)
        self.tokenizer = load_tokenizer(task.run, path)
        data = load_data(task.run, self.tokenizer, task.node)
        self.held_out = data.held_out
        for note in data.notes:
            recorder.note(note)
        steps = total_steps(task, len(data.train))
        recorder.total_steps = steps
        per_epoch = sampler.steps_per_epoch(len(data.train), int(task.section("train")["global_batch"]))
        recorder.step_tokens = sum(len(row.tokens) for row in data.train) / per_epoch
        ranks.claim_device(task)
        with digests.noting_sources():
            model = load_model(task, path, recorder.note)
        why_padded = _why_padded(task, model)
        ranks.connect(task)
        joined = not any(values[0] for values in ranks.gather([float(why_padded is not None)]))
        if joined:
            self.balance.join_rows()
        elif why_padded is None:
            attention.leave(model)
        else:
            recorder.note(f"rows of different length are padded: {why_padded}")
        resume = spread.bring(task, fault, recorder)
        self.saver.rows = content.of(data)
        content.refuse_other(self.saver.rows, task, resume)
        self.curves = Curves.carried_by(resume, task)
        keep_before(task, self.curves)
        self.compare = copies.Comparison(task).look

        batches = StepBatches(
            data.train,
            seed=task.seed,
            global_batch=int(task.section("train")["global_batch"]),
            steps=steps,
            balance=self.balance,
            rank=task.rank,
            form=Form(self.tokenizer.pad_token_id or 0, joined, fused_loss.takes_labelled(model)),
        )
        if task.rank == 0 and task.section("tracking")["tensorboard"]:
            self.tensorboard = TensorBoard(task.run_dir / "tensorboard", self.curves, task.resume_step)
        trainer = ShareTrainer(
            model=model,
            args=training_arguments(task, steps, recorder.note),
            batches=batches,
            task=task,
            interval=self.interval,
            before_first=self._before_first,
            after_step=self._after_step,
            after_pass=recorder.sign,
            load_weights=load_weights,
        )
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        self._finish(trainer)
        ranks.disconnect()

    def _before_first(self, trainer: ShareTrainer) -> None:
        """Everything is loaded and wrapped; no step is done yet in this attempt."""
        from homelab.worker import copies, ranks

        # The state of the optimizer comes from disks of unlike speed, and the first collective is in the first step.
        ranks.wait_for_all("prepared", self.task.world_size)
        begin = self.task.resume_step
        told = copies.refuse_unequal(trainer.model, self.task, f"step {begin}, seen on node {self.task.node}")
        if told:
            self.recorder.note(told)
        # A checkpoint is saved before the evaluation after the same step: a fault between them must not leave a hole in the curve.
        if begin not in self.curves.eval_losses and self._evaluates_after(begin):
            self.evaluate_s = _timed(lambda: self._evaluate(trainer, begin))
        self.interval.begin(time.perf_counter())
        self.recorder.heartbeat("training")

    def _after_step(self, trainer: ShareTrainer) -> None:
        """An optimizer step is done: write it down, then save and evaluate when it is time."""
        step = trainer.state.global_step
        self.recorder.step = step
        self._record(trainer, step)
        self.saver.check()
        if trainer.change and self.task.rank == 0:
            self.recorder.shares(step, trainer.change)
        last = step == self.recorder.total_steps
        if self.interval.is_due(step, last=last):
            self._save(trainer, step, last=last)
            self._keep_speeds(trainer)
        if self._evaluates_after(step):
            self.evaluate_s = _timed(lambda: self._evaluate(trainer, step))
        self.recorder.heartbeat("training")

    def _evaluates_after(self, step: int) -> bool:
        every = int(self.task.section("tracking")["eval_every_steps"])
        return step in (0, self.recorder.total_steps) or (every > 0 and step % every == 0)

    def _record(self, trainer: ShareTrainer, step: int) -> None:
        item, clock, task = trainer.item, trainer.clock, self.task
        assert item is not None and item.step == step - 1, "the order of the steps is the law"
        step_s = trainer.step_s
        per_epoch = sampler.steps_per_epoch(len(trainer.train_dataset.rows), trainer.train_dataset.global_batch)
        line = {
            "rank": task.rank,
            "node": task.node,
            "step": step,
            "epoch": item.epoch + (item.step % per_epoch + 1) / per_epoch,
            "loss": trainer.step_loss,
            "perplexity": perplexity(trainer.step_loss),
            "learning_rate": trainer.learning_rate,
            "grad_norm": trainer.grad_norm if math.isfinite(trainer.grad_norm) else None,
            "tokens": item.input_tokens,
            "samples": len(item.sources),
            "tokens_per_s": item.input_tokens / step_s,
            "compute_s": step_s - clock.communication_s,
            "communication_s": clock.communication_s,
            "step_s": step_s,
            "memory_bytes": peak_memory_bytes(task.device),
            "share": item.rows if self.balance.measured else task.shares[task.rank],
            "sent_bytes": trainer.reduction.step_bytes,
        }
        self.recorder.train(line, {"step": step, "epoch": item.epoch, "ids": item.sources})
        self.curves.train(line, time.time())
        if self.tensorboard:
            shown = ("loss", "perplexity", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "communication_s")
            self.tensorboard.write(step, {f"train/{name}": line[name] for name in shown})

    def _keep_speeds(self, trainer: ShareTrainer) -> None:
        """What was measured, for the next plan, by the first rank of each node. A full disk must not end a training for it."""
        if self.task.local_rank != 0:
            return
        import torch

        from homelab.worker import card_memory, speeds

        found = speeds.content(
            self.task,
            trainer.reports,
            steps=self.recorder.step - self.task.resume_step,
            sync_s=trainer.sync_s,
            row_tokens=[len(row.tokens) for row in trainer.train_dataset.rows],
            save_s=self.interval.own_stall_s,
            evaluate_s=self.evaluate_s if self.held_out else None,
            torch_version=torch.__version__,
            beside_torch_bytes=card_memory.beside_torch_bytes(self.task),
        )
        if found is None:
            return
        path = speeds.path_of(self.task)
        try:
            speeds.write(path, found)
        except OSError as error:
            self.recorder.note(f"the measured speeds could not be kept in {path}: {error.strerror}")

    def _evaluate(self, trainer: ShareTrainer, step: int) -> None:
        """The mean loss per token over the held-out rows, the same number on every rank."""
        if not self.held_out:
            return
        self.recorder.heartbeat("evaluating")
        from homelab.worker import ranks
        from homelab.worker.evaluate import held_out_loss

        loss = held_out_loss(
            trainer.model, self.held_out, self.balance, self.task.rank, trainer.train_dataset.form, trainer.args.device,
            after_pass=self.recorder.sign, wait=lambda: ranks.wait_for_all(f"evaluated/{step}", self.task.world_size),
        )  # fmt: skip
        self.curves.evaluation(step, loss, time.time())
        if self.task.rank == 0:
            self.recorder.evaluation(step, loss)
            if self.tensorboard:
                self.tensorboard.write(step, {"eval/loss": loss, "eval/perplexity": perplexity(loss)})

    def _save(self, trainer: ShareTrainer, step: int, *, last: bool) -> None:
        """A checkpoint on every node, by its first rank. The others wait, and say so.

        The first one of a run and the last one are on the disk of every node when this returns; others may still be written while
        the next steps are done.
        """
        from homelab.worker import ranks

        before = time.perf_counter()
        self.recorder.heartbeat("saving")
        told = self.compare(trainer.model, step)
        if told:
            self.recorder.note(told)
        self.curves.agree()
        if self.task.local_rank == 0:
            self.saver.begin(trainer, step, self.curves)
        ranks.wait_for_all(f"saved/{step}", self.task.world_size)
        save_s = time.perf_counter() - before
        if last or not self.is_saved:
            self.saver.finish()
            ranks.wait_for_all(f"written/{step}", self.task.world_size)
        self.is_saved = True
        now = time.perf_counter()
        self.interval.saved(now, save_s, self.saver.write_s)
        if self.task.local_rank == 0:
            self.recorder.saved(step, now - before, self.saver.size_bytes, in_background=self.saver.is_in_background)
        self._tell_of_the_cost()

    def _tell_of_the_cost(self) -> None:
        """Once: the two promises of the automatic interval contradict each other here."""
        interval = self.interval
        is_automatic = interval.every_steps is None and self.task.rank == 0
        if self.has_told or not is_automatic or not loses_more(interval.stall_s, interval.write_s):
            return
        self.has_told = True
        self.recorder.note(
            f"a checkpoint halts the training for {interval.stall_s:.1f} s and takes {interval.write_s:.0f} s more to be written, so there"
            f" is one every {interval.interval_s:.0f} s, and a fault may lose more than {LOSS_S:.0f} s of work; [checkpoint] every_steps"
            " sets it by hand"
        )

    def _finish(self, trainer: ShareTrainer) -> None:
        """final/ on the head: the adapter or the model, the tokenizer and a model card; then all are done together."""
        from homelab.worker import ranks
        from homelab.worker.weights import write_final

        self.recorder.heartbeat("saving")
        if self.tensorboard:
            self.tensorboard.close()
        if self.task.rank == 0:
            fence.check(self.task.run_dir, self.task.attempt)
            write_final(trainer.model, self.tokenizer, self.task, self.curves)
        ranks.wait_for_all("finished", self.task.world_size)
        self.recorder.heartbeat("done")  # everything is written; leaving the group comes after it, because that may stall


def _why_padded(task: Task, model: Any) -> str | None:
    """None where the model takes joined rows now. One rank that cannot is enough for all to pad: who gets which rows depends on it."""
    if not task.switches.joined_rows:
        return "the plan says so"
    from homelab.worker import attention
    from homelab.worker.model import DTYPES

    return attention.use(model, next(model.parameters()).device, DTYPES[task.precision])


def _timed(work: Callable[[], None]) -> float:
    """Seconds that it took."""
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def _known_save_s(task: Task) -> float | None:
    """How long a save halted an earlier attempt of this run; None for the first, and where it is not known."""
    from homelab.worker import speeds

    return speeds.save_s_of(task) if task.resume_step else None


def total_steps(task: Task, rows: int) -> int:
    """Optimizer steps of the whole run: [train] steps, or epochs times the steps of one."""
    train = task.section("train")
    if train.get("steps"):
        return int(train["steps"])
    return int(train["epochs"]) * sampler.steps_per_epoch(rows, int(train["global_batch"]))
