"""When this rank saves, and what it does around a save: compare the weights, save, wait for the other ranks, measure the cost."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from homelab.shared.law.checkpoint_interval import LOSS_S, Interval, loses_more
from homelab.shared.protocol import phases
from homelab.worker.checkpoints.async_save import Saver
from homelab.worker.checkpoints.best_weights import BestWeights
from homelab.worker.checkpoints.curves import Curves
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task
from homelab.worker.training import speed_profile

if TYPE_CHECKING:
    from homelab.worker.training.trainer import ShareTrainer


class Checkpointing:
    """The checkpoints of one attempt on one rank. `rows` identifies the training rows; every checkpoint carries it, and the curves and the best weights."""

    def __init__(self, task: Task, recorder: Recorder, curves: Curves, best: BestWeights, rows: dict[str, dict[str, str]]) -> None:
        self._task = task
        self._recorder = recorder
        self._curves = curves
        self._best = best
        self._saver = Saver(task, recorder.note, rows)
        known_s = speed_profile.save_s_of(task) if task.resume_step else None
        self.interval = Interval(task.checkpoint.every_steps, known_s)
        self._is_saved = task.resume_step > 0  # there is a checkpoint to resume from
        self._has_noted_the_cost = False

    def after_step(self, trainer: ShareTrainer, step: int, *, last: bool) -> bool:
        """Whether a checkpoint was due after this step, and is saved. Raises WorkerError where this save or an earlier one failed."""
        self._saver.check()
        if not self.interval.is_due(step, last=last):
            return False
        self._save(trainer, step, last=last)
        return True

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk. Raises WorkerError when it failed."""
        self._saver.finish()

    def _save(self, trainer: ShareTrainer, step: int, *, last: bool) -> None:
        """A checkpoint on every node, by its first rank. The others wait, and say so.

        The first one of a run and the last one are on the disk of every node when this returns; others may still be written while
        the next steps are done.
        """
        start_s = time.perf_counter()
        self._recorder.heartbeat(phases.SAVING)
        difference = trainer.strategy.check_weights(trainer.model, step)
        if difference:
            self._recorder.note(difference)
        self._curves.agree()
        own = trainer.strategy.state(trainer)
        if self._task.is_keeper:
            self._saver.begin(step, own, _of(trainer), self._curves, self._best)
        process_group.wait_for_all(f"saved/{step}", self._task.world_size)
        save_s = time.perf_counter() - start_s
        if last or not self._is_saved:
            self._saver.finish()
            process_group.wait_for_all(f"written/{step}", self._task.world_size)
        self._is_saved = True
        if self.interval.is_asked and self._task.is_keeper:
            self._task.save_request.unlink(missing_ok=True)
        now_s = time.perf_counter()
        self.interval.saved(now_s, save_s, self._saver.write_s)
        if self._task.is_keeper:
            self._recorder.saved(step, now_s - start_s, self._saver.size_bytes, in_background=self._saver.is_in_background)
        self._note_the_cost()

    def _note_the_cost(self) -> None:
        """Once: the two promises of the automatic interval contradict each other here."""
        interval = self.interval
        is_automatic = interval.every_steps is None and self._task.rank == 0
        if self._has_noted_the_cost or not is_automatic or not loses_more(interval.stall_s, interval.write_s):
            return
        self._has_noted_the_cost = True
        self._recorder.note(
            f"a checkpoint halts the training for {interval.stall_s:.1f} s and is written in {interval.write_s:.0f} s more: one is saved every"
            f" {interval.interval_s:.0f} s. A fault may lose more than {LOSS_S:.0f} s of work. [checkpoint] every_steps sets it by hand"
        )


def _of(trainer: ShareTrainer) -> dict[str, Any]:
    """What a checkpoint holds of the Trainer, under the names that it reads: file name -> content."""
    scaler = trainer.accelerator.scaler
    state = {"scheduler.pt": trainer.lr_scheduler.state_dict(), "trainer_state.json": trainer.state}
    return state if scaler is None else state | {"scaler.pt": scaler.state_dict()}
