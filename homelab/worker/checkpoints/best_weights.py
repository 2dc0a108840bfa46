"""The trained weights with the lowest held-out loss so far, for a recipe with [train] keep_best.

They lie in best/ of the run's folder, and every checkpoint carries them: an attempt that resumes knows the best step up to that checkpoint,
and no later one. Attempts that got further leave nothing that counts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from homelab.shared.law import early_stopping
from homelab.shared.protocol.files import sync
from homelab.worker.checkpoints.curves import Curves
from homelab.worker.errors import WorkerError, disk_fault
from homelab.worker.runtime.task import Task

FILE = "best.safetensors"


class BestWeights:
    """One per rank. The first rank of each node writes, so that every node's checkpoints are complete."""

    def __init__(self, task: Task, curves: Curves, resume: Path | None) -> None:
        """`resume`: the checkpoint that this attempt goes on from. Raises WorkerError where the disk does not take its weights."""
        self._task = task
        self._curves = curves
        self._folder = task.run_dir / "best"
        self._is_kept = task.train.keep_best
        self.step = early_stopping.best_step(curves.eval_losses) if self._is_kept else None
        if not self._is_kept or not task.is_keeper:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        if resume is not None and self.step is not None:
            from homelab.worker.checkpoints.tensor_files import link

            self._put(self.step, lambda path: link(resume / FILE, path))

    def evaluated(self, step: int, whole_weights: Callable[[], dict[str, Any]]) -> None:
        """The loss after `step` is in the curves: keep these weights where it is the best. Raises WorkerError where the disk is full.

        Every rank asks for the whole weights then, and the first of each node writes them.
        """
        if not self._is_kept or early_stopping.best_step(self._curves.eval_losses) != step:
            return
        from homelab.worker.checkpoints.tensor_files import save

        self.step = step
        tensors = whole_weights()
        if self._task.is_keeper:
            self._put(step, lambda path: save(tensors, path))

    def state(self) -> dict[str, Path]:
        """What a checkpoint carries of it; older files go. Call it when no checkpoint is being written."""
        if self.step is None:
            return {}
        for path in self._folder.iterdir():
            if path != self._path(self.step):
                path.unlink()
        return {FILE: self._path(self.step)}

    def load(self, tensors: dict[str, Any]) -> None:
        """Put the best weights into these, the whole ones by name. Does nothing where the recipe keeps those of the last step."""
        if self.step is not None:
            from homelab.worker.checkpoints.tensor_files import fill

            fill(tensors, self._path(self.step))

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.safetensors"

    def _put(self, step: int, write: Any) -> None:
        path = self._path(step)
        partial = path.with_name(f".{path.name}")
        try:
            self._folder.mkdir(exist_ok=True)
            write(partial)
            sync(partial)
            os.replace(partial, path)
        except Exception as error:  # safetensors has errors of its own
            why = disk_fault(error, self._task.run_dir)
            if why is None:
                raise
            partial.unlink(missing_ok=True)
            raise WorkerError(
                f"the best weights (step {step}) cannot be saved: {why}",
                where=str(self._folder),
                hint="make room on that disk (`df -h` shows it), then `homelab recover`; the checkpoints are untouched",
            ) from error
