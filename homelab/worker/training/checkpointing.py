"""When this rank saves, and what it does around a save: compare the weights, save, wait for the other ranks, measure the cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from homelab.shared.law.checkpoint_interval import LOSS_S, Interval, loses_more
from homelab.shared.protocol import checkpoint_copies, manifest, phases
from homelab.worker.checkpoints import disk_space
from homelab.worker.checkpoints.async_save import Saver
from homelab.worker.checkpoints.best_weights import BestWeights
from homelab.worker.checkpoints.curves import Curves
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task
from homelab.worker.training import speed_profile
from homelab.worker.training.parting_save import MOST_S, PartingSave

if TYPE_CHECKING:
    from homelab.worker.training.trainer import ShareTrainer


_SLOW_DISK_BYTES_PER_S = 100e6  # of a disk that has not been measured yet


class Checkpointing:
    """The checkpoints of one attempt on one rank. `rows` identifies the training rows; every checkpoint carries it, and the curves and the best weights."""

    def __init__(self, task: Task, recorder: Recorder, curves: Curves, best: BestWeights, rows: dict[str, dict[str, str]]) -> None:
        self._task = task
        self._recorder = recorder
        self._curves = curves
        self._best = best
        self._saver = Saver(task, recorder.note, rows)
        known_s = speed_profile.save_s_of(task) if task.resume_step else None
        self.interval = Interval(task.checkpoint.every_steps, known_s, task.checkpoint.keep_every)
        self._is_saved = task.resume_step > 0  # there is a checkpoint to resume from
        self._has_noted_the_cost = False
        self.parting = PartingSave(self._part)
        self._trainer: ShareTrainer | None = None
        self._changed: Any = None  # on a card: when the last change of the weights was computed
        begin = task.resume_step
        if begin and self._is_kept(begin, last=begin == recorder.total_steps):
            self._note_kept(begin)  # the checkpoint itself could not

    def begin(self, trainer: ShareTrainer) -> None:
        """The first step follows. From now on a fault or a stop saves the last whole step, where this rank can do it alone."""
        self.interval.begin(time.perf_counter())
        if self._task.is_keeper and trainer.strategy.saves_alone:
            self._trainer = trainer
            self.parting.listen()

    def step_is_whole(self) -> None:
        """The optimizer has stepped, and the step is written down."""
        if self._task.device == "cuda":
            import torch

            self._changed = torch.cuda.Event()
            self._changed.record()
        self.parting.end_change()

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

        The first one of a run, the last one and those that are kept are on the disk of every node when this returns; others may still be
        written while the next steps are done.
        """
        start_s = time.perf_counter()
        self._recorder.heartbeat(phases.SAVING)
        difference = trainer.strategy.check_weights(trainer.model, step)
        if difference:
            self._recorder.note(difference)
        self._curves.agree()
        own = trainer.strategy.state(trainer)
        if self._task.is_keeper:
            with self.parting.changing():
                self._saver.begin(step, own, _of(trainer), self._curves, self._best)
        process_group.wait_for_all(f"saved/{step}", self._task.world_size)
        save_s = time.perf_counter() - start_s
        is_kept = self._is_kept(step, last=last)
        if is_kept or not self._is_saved:
            self._saver.finish()
            process_group.wait_for_all(f"written/{step}", self._task.world_size)
        if is_kept:
            self._note_kept(step)
        self._is_saved = True
        if self.interval.is_asked and self._task.is_keeper:
            self._task.save_request.unlink(missing_ok=True)
        now_s = time.perf_counter()
        self.interval.saved(now_s, save_s, self._saver.write_s)
        if self._task.is_keeper:
            self._recorder.saved(step, now_s - start_s, self._saver.size_bytes, in_background=self._saver.is_in_background)
        self._note_the_cost()

    def _is_kept(self, step: int, *, last: bool) -> bool:
        """Whether the run's record names the checkpoint of this step. The last one stays as the newest."""
        return last or self._task.checkpoint.is_kept(step)

    def _note_kept(self, step: int) -> None:
        """The record names the state that this checkpoint holds. It is on the disk."""
        digests = manifest.digests(manifest.folder_of(self._task.run_dir, step)) if self._task.is_keeper else {}
        self._curves.kept(step, checkpoint_copies.state_digest(digests))

    def _part(self) -> None:
        """Save the last whole step without the other ranks, where that is quick."""
        trainer, step = self._trainer, self._recorder.step
        if trainer is None:
            return
        self._saver.finish()
        cost_s = (self.interval.own_stall_s or 0.0) + self._saver.write_s
        if step <= self._saver.step or cost_s > MOST_S:
            return
        start_s = time.perf_counter()
        with _beside_collectives(self._task, self._changed):
            own = trainer.strategy.state(trainer)
            if not cost_s and disk_space.of_state(own) > MOST_S * _SLOW_DISK_BYTES_PER_S:
                return
            self._curves.keep_own(self._task)
            self._saver.begin(step, own, _of(trainer), self._curves, self._best, parting=True)
        self._recorder.saved(step, time.perf_counter() - start_s, self._saver.size_bytes, in_background=False)

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


@contextlib.contextmanager
def _beside_collectives(task: Task, changed: Any) -> Iterator[None]:
    """On a card the usual stream may wait for a collective that never ends: weights are copied on another one, which waits for `changed` alone."""
    if task.device != "cuda":
        yield
        return
    import torch

    torch.cuda.set_device(task.local_rank)  # each thread has its own
    with torch.cuda.stream(torch.cuda.Stream()):
        if changed is not None:
            torch.cuda.current_stream().wait_event(changed)
        yield


def _of(trainer: ShareTrainer) -> dict[str, Any]:
    """What a checkpoint holds of the Trainer, under the names that it reads: file name -> content."""
    scaler = trainer.accelerator.scaler
    state = {"scheduler.pt": trainer.lr_scheduler.state_dict(), "trainer_state.json": trainer.state}
    return state if scaler is None else state | {"scaler.pt": scaler.state_dict()}
