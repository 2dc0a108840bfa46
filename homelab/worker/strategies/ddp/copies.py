"""The strategy "ddp": every rank holds the whole model, and torch's DistributedDataParallel, whose gradients are summed.

Nothing else in the worker names DistributedDataParallel. Every rank holds all of the state, so the first rank of each node saves it whole.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel

from homelab.shared.law.streaming import WORDS
from homelab.worker.model.pretrained import WHOLE, LoadedPart
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.strategies import replica_check, streamed_passes
from homelab.worker.strategies.base import Strategy
from homelab.worker.strategies.ddp import gradient_compression
from homelab.worker.strategies.pipeline import stage_reader


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


class Replicas(Strategy):
    """Copies of the model that sum their gradients."""

    def __init__(self, task: Task, steps: int) -> None:
        super().__init__(task)
        self._comparison = replica_check.Comparison(task)
        self.reduction = gradient_compression.reduction_for(task, steps)

    @property
    def sent_bytes(self) -> int:
        return self.reduction.step_bytes

    def arguments(self) -> dict[str, Any]:
        backend = self._task.backend if self._task.world_size > 1 else None
        return {"ddp_backend": backend, "ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}

    def configure(self, accelerator: Any) -> None:
        if accelerator.ddp_handler is not None:
            # Gradients live in DDP's buckets instead of beside them: one copy of the gradient less (`_keep_gradients`).
            accelerator.ddp_handler.gradient_as_bucket_view = True
            accelerator.ddp_handler.bucket_cap_mb = self._task.parallel.bucket_size_mb
            accelerator.ddp_handler = Wrapping.of(accelerator.ddp_handler)

    def before_wrap(self, model: Any) -> None:
        if self._task.world_size > 1:
            # Gradients of zero, before the model is wrapped: DDP takes those it finds into its buckets (reducer.cpp, initialize_bucket_views).
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)

    def after_wrap(self, wrapped: Any) -> None:
        if isinstance(wrapped, DistributedDataParallel):
            _keep_gradients(wrapped)

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        if not isinstance(wrapped, DistributedDataParallel):
            return

        def reduce(reduction, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
            if bucket.is_last():
                timer.gradients_ready()
            return reduction.reduce(bucket)

        wrapped.register_comm_hook(self.reduction, reduce)

    def without_reduction(self, accelerator: Any, wrapped: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = accelerator.no_sync(wrapped)
        return context

    @property
    def part(self) -> LoadedPart:
        streaming = self._task.streaming
        if streaming is None:
            return WHOLE
        words = (
            f"streamed: {streaming.layers} layers come from this machine's {WORDS[streaming.host]}, for {streaming.group} passes at a time"
        )
        return LoadedPart(stage_reader.reader(self._task, None), takes_kept=True, words=words)

    def run_passes(self, trainer: Any, model: Any, item: Any, count: Any) -> float:
        if self._task.streaming is None:
            return super().run_passes(trainer, model, item, count)
        with self.without_reduction(trainer.accelerator, model):
            loss = streamed_passes.run(trainer, model, item, count, self._task.streaming.group)
        if isinstance(model, DistributedDataParallel):
            _reduce(model)
            trainer.clock.gradients_reduced()
        return loss

    def check_start(self, model: Any, where: str) -> str | None:
        return replica_check.refuse_unequal(model, self._task, where)

    def check_weights(self, model: Any, step: int) -> str | None:
        return self._comparison.compare(replica_check.trained(model), step)


class _Nothing(torch.autograd.Function):
    """A number that no weight changes, with a gradient of zero for each."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(torch.zeros_like, ctx.saved_tensors))


def _reduce(wrapped: DistributedDataParallel) -> None:
    """Sum over the ranks the gradients that are there. DistributedDataParallel does that in a backward pass alone: this one adds nothing."""
    inner, trained = wrapped.module, [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    own = vars(inner).get("forward")
    inner.forward = lambda _: _Nothing.apply(*trained)
    try:
        wrapped(trained[0].new_zeros(())).backward()  # with a card of its own it looks at its first input (`_to_kwargs`, torch 2.13)
    finally:
        if own is None:
            del inner.forward
        else:
            inner.forward = own


def _keep_gradients(wrapped: Any) -> None:
    """Make `wrapped.zero_grad()` set the gradients to zero in place: from the first pass on there is one copy, in DDP's buckets.

    `gradient_as_bucket_view` alone does not do that. The Trainer's `model.zero_grad()` leaves no gradient at all (set_to_none), so the next
    backward pass makes new ones, and in a step of several passes they grow beside the buckets until the last pass copies them in
    (torch/nn/parallel/distributed.py; tried): 4 bytes more for every weight that is trained.
    """
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]

    def zero_grad(set_to_none: bool = False) -> None:
        with torch.no_grad():
            torch._foreach_zero_([parameter.grad for parameter in trained if parameter.grad is not None])

    wrapped.zero_grad = zero_grad


def make(task: Task, steps: int) -> Strategy:
    """The strategy of a task; `steps` that the run has."""
    return Replicas(task, steps)
