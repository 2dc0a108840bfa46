"""How long a step of a pipeline takes: what each stage computes of a pass, and the passes of all stages played through in the worker's own order. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.time import hidden_wire
from homelab.shared.law import pipeline_schedule
from homelab.shared.recipe import Method, Train


@dataclass(frozen=True)
class Costs:
    """Of a pass of the whole model, the part of one layer and of the head, forward and backward; they add up to 1."""

    layer_forward: float
    layer_backward: float
    head_forward: float
    head_backward: float

    def forward(self, layers: int, *, is_last: bool) -> float:
        """The part that so many layers compute forward."""
        return layers * self.layer_forward + (self.head_forward if is_last else 0.0)

    def backward(self, layers: int, *, is_last: bool) -> float:
        """And backward."""
        return layers * self.layer_backward + (self.head_backward if is_last else 0.0)

    def work(self, layers: int, *, is_last: bool) -> float:
        """And both."""
        return self.forward(layers, is_last=is_last) + self.backward(layers, is_last=is_last)


def costs_of(shape: Architecture, method: Method, train: Train, loss_part: float) -> Costs:
    """By floating-point operations: see `roofline.flops_per_token`. A fused loss computes the head for tokens with a loss alone, which are `loss_part`."""
    head_backward, blocks_backward = hidden_wire.backward_flops(shape, method, train)
    labelled = loss_part if shape.fuses(train.fused_loss) else 1.0
    head, head_backward_part = hidden_wire.head_weights(shape) * labelled, head_backward * labelled
    head_forward = 2 * head + (2 * head if hidden_wire.has_early_head(method, train) else 0)
    blocks_forward = 2 * shape.active_parameters
    total = head_forward + head_backward_part + blocks_forward + blocks_backward
    return Costs(
        blocks_forward / total / shape.layers, blocks_backward / total / shape.layers, head_forward / total, head_backward_part / total
    )


@dataclass(frozen=True)
class StageTimes:
    """The passes of one stage, in seconds for each micro-batch, and its messages to the stage behind it (0: there is none)."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    message_s: Sequence[float]
    in_flight: int

    @property
    def busy_s(self) -> float:
        """Seconds in which the stage computes."""
        return sum(self.forward_s) + sum(self.backward_s)


def step_s(stages: Sequence[StageTimes]) -> float:
    """Seconds from the first pass to the last. A message of one direction follows the one before it; sending costs the stage no time."""
    count = len(stages[0].forward_s)
    orders = [pipeline_schedule.order(count, stage.in_flight) for stage in stages]
    last = len(stages) - 1
    free_s, next_action = [0.0] * len(stages), [0] * len(stages)
    ready: dict[tuple[str, int, int], float] = {("forward", 0, index): 0.0 for index in range(count)}
    line_s = {(kind, stage): 0.0 for kind in ("forward", "backward") for stage in range(len(stages))}
    while any(position < 2 * count for position in next_action):
        before = list(next_action)
        for number, stage in enumerate(stages):
            while next_action[number] < 2 * count:
                kind, index = orders[number][next_action[number]]
                if (kind, number, index) not in ready:
                    break
                began_s = max(free_s[number], ready[kind, number, index])
                free_s[number] = ended_s = began_s + (stage.forward_s if kind == "forward" else stage.backward_s)[index]
                next_action[number] += 1
                if kind == "forward" and number == last:
                    ready["backward", number, index] = ended_s
                elif kind == "forward":
                    line_s[kind, number] = ready[kind, number + 1, index] = max(line_s[kind, number], ended_s) + stage.message_s[index]
                elif number > 0:
                    line_s[kind, number] = ready[kind, number - 1, index] = (
                        max(line_s[kind, number], ended_s) + stages[number - 1].message_s[index]
                    )
        assert next_action != before, "every stage waits for another"
    return max(free_s)
