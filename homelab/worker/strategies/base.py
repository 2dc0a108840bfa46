"""What a strategy is: how a training is spread over the ranks, as the trainer asks it.

The base class is the training of one rank that has the whole model to itself; a strategy says in what it differs. Another one is a folder beside
this file with a function `make(task, steps) -> Strategy`, and its line in `registry`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from homelab.worker.balancing.balancer import Balance
from homelab.worker.checkpoints import optimizer_state, weights
from homelab.worker.data.batches import Batch, Form, StepBatches, copied
from homelab.worker.data.rows import Row
from homelab.worker.model.pretrained import WHOLE, LoadedPart
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task
from homelab.worker.strategies import gradient_norm


class Strategy:
    """What is asked of a strategy, in the order of a training."""

    def __init__(self, task: Task) -> None:
        self._task = task

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank put into collectives for gradients in the current step so far."""
        return 0

    @property
    def counting_rank(self) -> int:
        """The rank whose rows of a batch this rank computes, and that counts them: itself, unless ranks compute parts of the same micro-batches."""
        return self._task.rank

    @property
    def part(self) -> LoadedPart:
        """What of the model this rank loads."""
        return WHOLE

    @property
    def saves_alone(self) -> bool:
        """Whether this rank has all of the state, and `state` asks no other rank."""
        return True

    def batches(self, rows: Sequence[Row], *, steps: int, balance: Balance, form: Form) -> StepBatches:
        """What this rank computes in each of `steps` optimizer steps."""
        return self._batches_as(StepBatches, rows, steps, balance, form)

    def _batches_as(self, kind: type[StepBatches], rows: Sequence[Row], steps: int, balance: Balance, form: Form) -> StepBatches:
        train = self._task.train
        return kind(
            rows, seed=train.seed, global_batch=train.global_batch, steps=steps, balance=balance, rank=self.counting_rank, form=form
        )

    @property
    def places_model(self) -> bool:
        """Whether the strategy itself divides the model, which accelerate must not wrap then."""
        return False

    def divides_on_host(self, model: Any) -> bool:
        """Whether this model stays in host memory until the strategy has divided it."""
        return False

    def arguments(self) -> dict[str, Any]:
        """The strategy's part of transformers' TrainingArguments."""
        return {}

    def configure(self, accelerator: Any) -> None:
        """Set up accelerate before the model is wrapped."""

    def before_wrap(self, model: Any) -> None:
        """Prepare the plain model. Collective."""

    def after_wrap(self, wrapped: Any) -> None:
        """Prepare the wrapped model. With one rank it is the plain one."""

    def reduce_gradients(self, wrapped: Any, timer: StepTimer) -> None:
        """Install the reduction of gradients, which tells `timer` when this rank's last gradient is ready."""

    def begin_step(self, wrapped: Any, passes: int) -> int:
        """Before the passes of a step, of which this rank's rows need so many: how many it must make. Collective."""
        return passes

    def run_passes(self, trainer: Any, model: Any, item: Any, count: Any) -> float:
        """All passes of this rank in a step, and the loss that it has computed. Collective."""
        loss: float = trainer.own_passes(model, item, count)
        return loss

    def without_reduction(self, accelerator: Any, wrapped: Any) -> AbstractContextManager[Any]:
        """Around every pass of a step but the last."""
        return contextlib.nullcontext()

    def evaluate(self, model: Any, batches: Sequence[Batch], form: Form, after_pass: Callable[[], None]) -> float:
        """The summed loss of these batches, 0 on a rank that computes none. Collective."""
        device, summed = next(model.parameters()).device, 0.0
        with self.evaluating(model, len(batches)) as passes:
            for batch in [*batches, *[form.stand_in(packed=False)] * (passes - len(batches))]:
                (inputs,) = copied([batch], device, pin=device.type == "cuda")
                # num_items_in_batch = 1 makes the model's loss a sum.
                summed += float(model(**inputs, num_items_in_batch=torch.tensor(1, device=device)).loss)
                after_pass()
        return summed

    def evaluating(self, model: Any, passes: int) -> AbstractContextManager[int]:
        """Around passes without gradients, of which this rank's rows need so many: how many it must make, the rest over a row without a loss. Collective."""
        return contextlib.nullcontext(passes)

    def clip(self, model: Any, most: float) -> float:
        """The norm of the whole gradient, the same on every rank, after which it is at most `most` long. Collective."""
        norm: float = gradient_norm.clip([parameter.grad for parameter in model.parameters() if parameter.grad is not None], most)
        return norm

    def state(self, trainer: Any) -> dict[str, Any]:
        """Weights and optimizer as the first rank of a node saves them: file name -> content. Collective; on other ranks it may be empty."""
        return {weights.WEIGHTS: weights.trained(trainer.model), weights.OPTIMIZER: trainer.optimizer.state_dict()}

    def whole_weights(self, model: Any, part: Callable[[Any], dict[str, Any]] = weights.trained) -> dict[str, Any]:
        """The whole weights that are trained, or what `part` names of the model, by name. Collective; of use on the first rank of a node alone."""
        return part(model)

    def load_weights(self, model: Any, checkpoint: Path) -> None:
        """Put the saved weights into the model, before it is divided. Raises WorkerError where they do not fit."""
        weights.load_weights(model, checkpoint)

    def load_optimizer(self, optimizer: Any, checkpoint: Path, device: Any) -> None:
        """Put the saved state into the optimizer."""
        optimizer_state.load(optimizer, checkpoint / weights.OPTIMIZER, device)

    def check_start(self, model: Any, where: str) -> str | None:
        """What a person should know of the weights at the start. Collective. Raises TrainingError where ranks cannot train together."""
        return None

    def check_weights(self, model: Any, step: int) -> str | None:
        """What a person should know of the weights after `step`; None where there is nothing new. Collective."""
        return None
