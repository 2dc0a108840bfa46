"""Whether this rank profiles some steps of this attempt, as run.json asks for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

from homelab.shared.protocol import profile_files
from homelab.worker.profiling.step_profiler import StepProfiler, partial_folder
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task


def install(trainer: Any, task: Task, recorder: Recorder) -> Callable[[], None]:
    """Have the trainer profile what is asked for, before its first step; what is to be called after its last one."""
    asked = task.run[profile_files.REQUEST]
    shutil.rmtree(partial_folder(task), ignore_errors=True)  # of an attempt that ended in the middle of it
    first, last = int(asked["first_step"]), int(asked["last_step"])
    if task.rank not in asked["ranks"] or first <= task.resume_step or _was_profiled(task):
        return lambda: None
    if last > recorder.total_steps:
        recorder.note(
            f"no profile: the run ends after step {recorder.total_steps}, before step {last}. fix: launch again with earlier steps, --profile FIRST-LAST"
        )
        return lambda: None
    profiler = StepProfiler(trainer, task, recorder, first, last)
    profiler.install()
    return profiler.finish


def _was_profiled(task: Task) -> bool:
    """This rank, or by an earlier attempt any that was here: a rank may have moved to another node."""
    folder = task.run_dir / profile_files.PROFILES
    ranks = [profile_files.rank_of(name) for name in os.listdir(folder)] if folder.is_dir() else []
    return task.rank in ranks or (task.attempt > 1 and any(rank is not None for rank in ranks))
