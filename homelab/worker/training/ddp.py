"""The strategy "ddp": every rank holds the whole model, and torch's DistributedDataParallel, whose gradients are summed.

Nothing else in the worker names DistributedDataParallel. Every rank holds all of the state, so the first rank of each node saves it whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from homelab.worker.checkpoints import optimizer_state, weights
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.training import gradient_buffers, gradient_compression, gradient_norm, replica_check
from homelab.worker.training.strategy import Strategy


@dataclasses.dataclass
class Wrapping(DistributedDataParallelKwargs):
    """accelerate's settings of DistributedDataParallel and those for which accelerate has no name. It takes the place of accelerate's own
    handler, which passes on only the fields it knows (accelerate/utils/dataclasses.py, to_kwargs: all that differ from the defaults)."""

    init_sync: bool = True  # torch's default: rank 0 sends every weight, frozen ones too, to all others

    @classmethod
    def of(cls, handler: DistributedDataParallelKwargs) -> Wrapping:
        """The settings of `handler`, except that no weight is sent: `replica_check` compares the weights."""
        settings = {field.name: getattr(handler, field.name) for field in dataclasses.fields(handler)}
        return cls(**{**settings, "init_sync": False})


class Replicas:
    """Copies of the model that sum their gradients."""

    def __init__(self, task: Task, steps: int) -> None:
        self._task = task
        self._comparison = replica_check.Comparison(task)
        self.reduction = gradient_compression.reduction_for(task, steps)

    @property
    def sent_bytes(self) -> int:
        return self.reduction.step_bytes

    @property
    def places_model(self) -> bool:
        return False

    def divides_on_host(self, model: Any) -> bool:
        return False

    def arguments(self) -> dict[str, Any]:
        backend = self._task.backend if self._task.world_size > 1 else None
        return {"ddp_backend": backend, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}

    def configure(self, accelerator: Any) -> None:
        if accelerator.ddp_handler is not None:
            # Gradients live in DDP's buckets instead of beside them: one copy of the gradient less (`gradient_buffers`).
            accelerator.ddp_handler.gradient_as_bucket_view = True
            accelerator.ddp_handler.bucket_cap_mb = self._task.parallel.bucket_size_mb
            accelerator.ddp_handler = Wrapping.of(accelerator.ddp_handler)

    def before_wrap(self, model: Any) -> None:
        if self._task.world_size > 1:
            gradient_buffers.make(model.parameters())

    def after_wrap(self, wrapped: Any) -> None:
        if isinstance(wrapped, DistributedDataParallel):
            gradient_buffers.keep(wrapped)

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        if not isinstance(wrapped, DistributedDataParallel):
            return

        def reduce(reduction, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            if bucket.is_last():
                timer.gradients_ready()
            return reduction.reduce(bucket)

        wrapped.register_comm_hook(self.reduction, reduce)

    def begin_step(self, wrapped: Any, passes: int) -> int:
        return passes

    def without_reduction(self, accelerator: Any, wrapped: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = accelerator.no_sync(wrapped)
        return context

    def evaluating(self, model: Any, passes: int) -> AbstractContextManager[int]:
        return contextlib.nullcontext(passes)

    def clip(self, model: Any, most: float) -> float:
        norm: float = gradient_norm.clip([parameter.grad for parameter in model.parameters() if parameter.grad is not None], most)
        return norm

    def state(self, trainer: Any) -> dict[str, Any]:
        return {weights.WEIGHTS: weights.trained(trainer.model), weights.OPTIMIZER: trainer.optimizer.state_dict()}

    def whole_weights(self, model: Any, part: Callable[[Any], dict[str, Any]] = weights.trained) -> dict[str, Any]:
        return part(model)

    def load_weights(self, model: Any, checkpoint: Path) -> None:
        weights.load_weights(model, checkpoint)

    def load_optimizer(self, optimizer: Any, checkpoint: Path, device: Any) -> None:
        optimizer_state.load(optimizer, checkpoint / weights.OPTIMIZER, device)

    def check_start(self, model: Any, where: str) -> str | None:
        return replica_check.refuse_unequal(model, self._task, where)

    def check_weights(self, model: Any, step: int) -> str | None:
        return self._comparison.compare(model, step)


def make(task: Task, steps: int) -> Strategy:
    return Replicas(task, steps)
