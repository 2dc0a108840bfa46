"""The worker's own pipeline classes on stand-in cards: a step, or an evaluation, of a model whose layers take a time that the test chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from homelab.shared.law.stage import Stage
from homelab.worker.strategies.pipeline import neighbours, passes
from tests.worker.cards import ranks
from tests.worker.cards.card import Card, OnCard
from tests.worker.cards.nccl import Rules

HIDDEN = 8
FORWARD, BACKWARD = "forward kernels", "backward kernels"


@dataclass(frozen=True)
class Speeds:
    """Seconds of each stage's passes of a micro-batch."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]

    def busy_s(self, rank: int, micro_batches: int) -> float:
        """What a step is for this stage, in truth."""
        return micro_batches * (self.forward_s[rank] + self.backward_s[rank])


@dataclass
class Played:
    """What came of it: why it stood still, each rank's own measurement, and the seconds that it took."""

    deadlock: str = ""
    work: list[passes.StageWork] = field(default_factory=list)
    step_s: float = 0.0


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, model: _Model) -> torch.Tensor:
        context.model = model
        model.card.launch(FORWARD, model.speeds.forward_s[model.rank])
        return hidden * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        model = context.model
        model.card.launch(BACKWARD, model.speeds.backward_s[model.rank])
        return gradient * 1.0, None


@dataclass
class _Model:
    card: Card
    rank: int
    speeds: Speeds
    is_last: bool

    def __call__(self, *, input_ids: Any = None, inputs_embeds: Any = None, **_other: Any) -> SimpleNamespace:
        entered = inputs_embeds if inputs_embeds is not None else torch.ones(*input_ids.shape, HIDDEN).as_subclass(OnCard).requires_grad_()
        left = _Layers.apply(entered, self)
        return SimpleNamespace(loss=left.sum() if self.is_last else None, logits=left)


def play(
    in_flight: Sequence[int], speeds: Speeds, rules: Rules, micro_batches: int,
    what: Callable[[passes.PipelinePasses, list[dict[str, Any]]], passes.StageWork] | None = None,
) -> Played:  # fmt: skip
    """`what` (a step) on as many stages as `in_flight` has numbers."""
    count = len(in_flight)
    played = Played(work=[passes.StageWork() for _ in in_flight])

    def program(rank: int) -> None:
        stage = Stage(number=rank, count=count, begin=rank, end=rank + 1, layers=count, in_flight=in_flight[rank])
        between = neighbours.Neighbours.of(rank, range(count))
        model = _Model(made.card, rank, speeds, stage.is_last)
        pipeline = passes.PipelinePasses(model, stage, between, torch.float32, made.card, HIDDEN, contextlib.nullcontext, lambda: None)
        batches = [{"input_ids": torch.ones(1, 16, dtype=torch.int64).as_subclass(OnCard)} for _ in range(micro_batches)]
        played.work[rank] = (what or step)(pipeline, batches)

    with ranks.of(count, rules) as made:
        played.deadlock = made.play(program)
        played.step_s = made.end_s
    return played


def step(pipeline: passes.PipelinePasses, batches: list[dict[str, Any]]) -> passes.StageWork:
    """One step of the training."""
    return pipeline.step(batches, [0] * len(batches), torch.tensor(1), lambda loss: loss.backward())[1]


def evaluation_and_step(pipeline: passes.PipelinePasses, batches: list[dict[str, Any]]) -> passes.StageWork:
    """Held-out rows before the first step, as the worker does."""
    held_out = [{name: tensor.as_subclass(torch.Tensor) for name, tensor in batch.items()} for batch in batches]
    with torch.no_grad():
        pipeline.summed_losses(held_out, torch.tensor(1))
    return step(pipeline, batches)


__all__ = ["BACKWARD", "FORWARD", "Played", "Rules", "Speeds", "evaluation_and_step", "play", "step"]
