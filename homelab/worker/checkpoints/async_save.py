"""This node's checkpoints: a small state is written while the training waits, a large one is copied and written while it goes on."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.law.checkpoint_interval import BACKGROUND_BYTES
from homelab.worker.checkpoints import checkpoint_folder, disk_space
from homelab.worker.errors import size_words
from homelab.worker.runtime.task import Task

if TYPE_CHECKING:
    from homelab.worker.checkpoints.best_weights import BestWeights
    from homelab.worker.checkpoints.curves import Curves

# Memory that stays free beside the copy: for the page cache and for other programs.
SPARE_BYTES = 1 << 30


class Background:
    """Runs one piece of work at a time in a thread of its own; its failure is not lost. The thread does not keep the process alive: unfinished work ends with the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.took_s = 0.0  # by the last piece of work that was done

    def start(self, work: Callable[[], object]) -> None:
        """Begin. Waits for the last piece first, and raises what that one raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the work, if it has ended with one."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until the work is done; raises its error, once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, work: Callable[[], object]) -> None:
        before = time.perf_counter()
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the next `wait` or `check`
            self._error = error
        else:
            self.took_s = time.perf_counter() - before


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
        self.step = task.resume_step  # of the last one that was begun
        self.is_in_background = False

    def begin(
        self, step: int, own: dict[str, Any], of_trainer: dict[str, Any], curves: Curves, best: BestWeights, *, parting: bool = False
    ) -> None:
        """Save the state after `step`: it is on the disk when this returns, or copied, and on the disk after `finish`.

        `own`: weights and optimizer, as the strategy saves them; `of_trainer`: what the Trainer reads again. Waits for the write before, and raises
        WorkerError when that one or this one fails. `parting`: the process ends after it, so it is not copied, and older checkpoints stay: no other
        node may have this one.
        """
        from homelab.worker.checkpoints.tensor_files import copy_of, writers_of
        from homelab.worker.checkpoints.weights import state_of_run

        self._background.wait()
        root, keep = self._task.checkpoints_dir, self._task.checkpoint.keep
        self.size_bytes = disk_space.of_state(own)
        if not parting:
            disk_space.make(root, step, self.size_bytes, keep, self._task.checkpoint.is_kept)
        state = own | of_trainer | state_of_run(self._task, curves, best, self._rows)
        self.step = step
        self.is_in_background = not parting and self.size_bytes >= self._least_bytes and self._has_memory()
        if not self.is_in_background:
            self._write(root, step, None if parting else keep, writers_of(state))
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

    def _write(self, root: Path, step: int, keep: int | None, writers: dict[str, Any]) -> None:
        checkpoint_folder.write(root, step, self._task.recipe_hash, writers, attempt=self._task.attempt)
        if keep is not None:  # only now: during the write, the older ones were the only complete checkpoints
            checkpoint_folder.retain(root, keep, newest=step, is_kept=self._task.checkpoint.is_kept)

    def _has_memory(self) -> bool:
        free_bytes = available_bytes()
        if free_bytes is None or free_bytes >= self.size_bytes + SPARE_BYTES:
            return True
        self._note(
            f"checkpoints are written while the training waits: {self._task.node} has {size_words(free_bytes)} of free memory,"
            f" and a copy of the state needs {size_words(self.size_bytes)}"
        )
        return False


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that programs can still have without swapping (Linux's MemAvailable); None where the system does not say."""
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
