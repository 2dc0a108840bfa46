"""This node's checkpoints: a small state is written while the training waits, a large one is copied and written while it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.law.checkpoint_interval import BACKGROUND_BYTES
from homelab.worker.checkpoints import checkpoint_folder, disk_space
from homelab.worker.checkpoints.background import Background
from homelab.worker.runtime.task import Task

if TYPE_CHECKING:
    from homelab.worker.checkpoints.best_weights import BestWeights
    from homelab.worker.checkpoints.curves import Curves
    from homelab.worker.training.trainer import ShareTrainer

# Memory that stays free beside the copy: for the page cache and for other programs.
SPARE_BYTES = 1 << 30


class Saver:
    """One per node, in its first rank. Every checkpoint carries `rows`: what is trained on.

    HOMELAB_BACKGROUND_BYTES moves the size from which a state is written in the background.
    """

    def __init__(self, task: Task, note: Callable[[str], None], rows: dict[str, dict[str, str]]) -> None:
        self._task = task
        self._note = note
        self._least_bytes = int(os.environ.get("HOMELAB_BACKGROUND_BYTES", BACKGROUND_BYTES))
        self._background = Background("checkpoint")
        self._rows = rows
        self.size_bytes = 0  # of the last checkpoint
        self.is_in_background = False

    def begin(self, trainer: ShareTrainer, step: int, own: dict[str, Any], curves: Curves, best: BestWeights) -> None:
        """Save the state after `step`: it is on the disk when this returns, or copied, and on the disk after `finish`.

        `own`: weights and optimizer, as the strategy saves them. Waits for the write before, and raises WorkerError when that one or this one fails.
        """
        from homelab.worker.checkpoints.weights import checkpoint_state, copy_of, writers_of

        self._background.wait()
        root, keep = self._task.checkpoints_dir, self._task.checkpoint.keep
        self.size_bytes = disk_space.of_state(own)
        disk_space.make(root, step, self.size_bytes, keep)
        state = own | checkpoint_state(trainer, self._task, curves, best, self._rows)
        self.is_in_background = self.size_bytes >= self._least_bytes and self._has_memory()
        if not self.is_in_background:
            self._write(root, step, keep, writers_of(state))
            return
        copied = writers_of(copy_of(state, self._task.device))
        self._background.start(lambda: self._write(root, step, keep, copied))

    def check(self) -> None:
        """Raise the WorkerError of a write that has failed meanwhile."""
        self._background.check()

    def finish(self) -> None:
        """Wait until the last write is on the disk. Raises WorkerError when it failed."""
        self._background.wait()

    @property
    def write_s(self) -> float:
        """How long the last write took that was done in the background; 0 where there was none."""
        return self._background.took_s

    def _write(self, root: Path, step: int, keep: int, writers: dict[str, Any]) -> None:
        checkpoint_folder.write(root, step, self._task.recipe_hash, writers, attempt=self._task.attempt)
        # Only now: during the write, the older ones were the only complete checkpoints.
        checkpoint_folder.retain(root, keep, newest=step)

    def _has_memory(self) -> bool:
        free_bytes = available_bytes()
        if free_bytes is None or free_bytes >= self.size_bytes + SPARE_BYTES:
            return True
        self._note(
            f"checkpoints are written while the training waits: {self._task.node} has {disk_space.words(free_bytes)} of memory free,"
            f" and a copy of the state to write from takes {disk_space.words(self.size_bytes)}"
        )
        return False


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that programs can still have without swapping (Linux's MemAvailable); None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
