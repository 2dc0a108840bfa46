"""The strategies that this worker has, by the name that a plan gives them."""

from __future__ import annotations

import importlib

from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.base import Strategy

_SHARDED = "homelab.worker.strategies.sharded.shards"
_MODULES = {
    "ddp": "homelab.worker.strategies.ddp.copies",
    "zero2": _SHARDED,
    "zero3": _SHARDED,
    "fsdp": _SHARDED,
    "hsdp": _SHARDED,
    "pipeline": "homelab.worker.strategies.pipeline.stages",
}


def strategy_of(task: Task, steps: int) -> Strategy:
    """The strategy of the plan, for a run of `steps` optimizer steps. Raises WorkerError for one that this worker does not have."""
    if task.strategy not in _MODULES:
        raise WorkerError(
            f"this worker has no strategy {task.strategy!r}; it has {', '.join(_MODULES)}",
            where="[parallel] strategy in the recipe",
            hint='set [parallel] strategy = "auto" and launch again',
        )
    name = "ddp" if task.strategy == "pipeline" and task.world_size == 1 else task.strategy  # one rank has nobody to share layers with
    strategy: Strategy = importlib.import_module(_MODULES[name]).make(task, steps)
    return strategy
