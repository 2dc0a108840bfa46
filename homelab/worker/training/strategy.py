"""How a training is spread over the ranks: the plan names the strategy, and one module implements it.

Another strategy is one module with a function `make(task, steps) -> Strategy`, and its line in `_MODULES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from homelab.worker.errors import WorkerError
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task

_SHARDED = "homelab.worker.training.sharded"
_PIPELINE = "homelab.worker.training.pipeline"
_MODULES = {
    "ddp": "homelab.worker.training.ddp",
    "zero2": _SHARDED,
    "zero3": _SHARDED,
    "fsdp": _SHARDED,
    "hsdp": _SHARDED,
    "pipeline": _PIPELINE,
}


class Strategy(Protocol):
    """What the trainer asks of a strategy, in the order of a training."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank put into collectives for gradients in the current step so far."""
        ...

    @property
    def places_model(self) -> bool:
        """Whether the strategy itself divides the model, which accelerate must not wrap then."""
        ...

    def divides_on_host(self, model: Any) -> bool:
        """Whether this model stays in host memory until the strategy has divided it."""
        ...

    def arguments(self) -> dict[str, Any]:
        """The strategy's part of transformers' TrainingArguments."""
        ...

    def configure(self, accelerator: Any) -> None:
        """Set up accelerate before the model is wrapped."""
        ...

    def before_wrap(self, model: Any) -> None:
        """Prepare the plain model."""
        ...

    def after_wrap(self, wrapped: Any) -> None:
        """Prepare the wrapped model. With one rank it is the plain one."""
        ...

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        """Install the reduction of gradients, which tells `timer` when this rank's last gradient is ready."""
        ...

    def begin_step(self, wrapped: Any, passes: int) -> int:
        """Before the passes of a step, of which this rank's rows need so many: how many it must make. Collective."""
        ...

    def without_reduction(self, accelerator: Any, wrapped: Any) -> AbstractContextManager[Any]:
        """Around every pass of a step but the last."""
        ...

    def evaluating(self, model: Any, passes: int) -> AbstractContextManager[int]:
        """Around passes without gradients, of which this rank's rows need so many: how many it must make. Collective."""
        ...

    def clip(self, model: Any, most: float) -> float:
        """The norm of the whole gradient, the same on every rank, after which it is at most `most` long. Collective."""
        ...

    def state(self, trainer: Any) -> dict[str, Any]:
        """Weights and optimizer as the first rank of a node saves them: file name -> content. Collective; on other ranks it may be empty."""
        ...

    def whole_weights(self, model: Any, part: Callable[[Any], dict[str, Any]] = ...) -> dict[str, Any]:
        """The whole weights that are trained, or what `part` names of the model, by name. Collective; of use on the first rank of a node alone."""
        ...

    def load_weights(self, model: Any, checkpoint: Path) -> None:
        """Put the saved weights into the model. Raises WorkerError where they do not fit."""
        ...

    def load_optimizer(self, optimizer: Any, checkpoint: Path, device: Any) -> None:
        """Put the saved state into the optimizer."""
        ...

    def check_start(self, model: Any, where: str) -> str | None:
        """What a person should know of the weights at the start. Collective. Raises TrainingError where ranks cannot train together."""
        ...

    def check_weights(self, model: Any, step: int) -> str | None:
        """What a person should know of the weights after `step`; None where there is nothing new. Collective."""
        ...


@runtime_checkable
class Scheduled(Protocol):
    """A strategy with an order of passes of its own, in which ranks compute parts of the same micro-batches."""

    @property
    def counting_rank(self) -> int:
        """The rank that the plan gives all rows: it counts them."""
        ...

    def run_passes(self, trainer: Any, model: Any, item: Any, count: Any) -> float:
        """All passes of this rank in a step, and the loss that it has computed. Collective."""
        ...

    def evaluate(self, model: Any, batches: list[dict[str, Any]], after_pass: Callable[[], None]) -> float:
        """The summed loss of these batches, on the rank that computes it; 0 on the others. Collective."""
        ...


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
