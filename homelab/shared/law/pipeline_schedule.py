"""The order in which a stage of a pipeline computes the micro-batches of a step: forward passes first, then one backward and one forward in turn (1F1B).

`in_flight` says how many micro-batches a stage may have begun and not ended: each keeps its activations. One for every stage from this one
to the last is what keeps all of them busy on an endless wire (Narayanan et al., PipeDream-2BW and Megatron-LM, 2021); one more for every
boundary hides the time of a message. A stage keeps no more than the stage before it: it would wait for a micro-batch that the other begins only
after an answer. The worker follows this order, and the planner reckons with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

POSTED = 2  # receives that are posted before their message is needed
UNDER_WAY = 2  # messages that are on their way at most, when the next is to be sent
# A stage that sends one more waits until the next one has taken one; that waits in the same way to send its gradients back, and neither takes any more.
_MOST_MORE = 2 * (POSTED + UNDER_WAY)


class Action(NamedTuple):
    """One pass of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def order(micro_batches: int, in_flight: int) -> list[Action]:
    """All passes of one stage in a step, each micro-batch forward and backward once, both in the order of the batch."""
    assert in_flight >= 1
    actions, begun, ended = [], 0, 0
    while ended < micro_batches:
        if begun < micro_batches and begun - ended < in_flight:
            actions.append(Action("forward", begun))
            begun += 1
        else:
            actions.append(Action("backward", ended))
            ended += 1
    return actions


def never_stuck(in_flight: Sequence[int]) -> tuple[int, ...]:
    """Of each stage, so that no two of them wait for each other: one keeps only a few micro-batches more than the next."""
    result = list(in_flight)
    for stage in reversed(range(len(result) - 1)):
        result[stage] = min(result[stage], result[stage + 1] + _MOST_MORE)
    return tuple(result)


def least_in_flight(stage: int, stages: int) -> int:
    """What `stage` (from 0) needs so that no later stage waits for it where messages take no time."""
    return stages - stage


def most_in_flight(stage: int, stages: int) -> int:
    """The same where a message takes up to as long as a pass."""
    return 2 * (stages - stage) - 1
