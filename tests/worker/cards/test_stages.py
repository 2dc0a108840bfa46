"""The pipeline by the rules of NCCL and of a card: no stage waits for ever, and a wait for a neighbour is no work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from homelab.shared.law.pipeline_schedule import least_in_flight, most_in_flight
from homelab.worker.strategies.pipeline import passes
from tests.worker.cards.nccl import Rules
from tests.worker.cards.stages import BACKWARD, FORWARD, Speeds, evaluation_and_step, play, step

pytestmark = pytest.mark.timeout(60)
MICRO_BATCHES = 12
EQUAL = {stages: Speeds([1.0] * stages, [2.0] * stages) for stages in (2, 3, 4, 5)}


@pytest.mark.parametrize("what", [step, evaluation_and_step])
@pytest.mark.parametrize("kept", [least_in_flight, most_in_flight])
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
@pytest.mark.parametrize("kernel", [FORWARD, BACKWARD])
def test_no_stage_waits_for_ever(stages: int, kept: Callable[[int, int], int], kernel: str, what: Any) -> None:
    """Connections are made by the first message, kernels are loaded by their first launch, and an allocator gives memory back in the middle."""
    in_flight = [kept(stage, stages) for stage in range(stages)]
    for rank in range(stages):
        rules = Rules(retries_at=(rank, kernel, 3), message_s=0.1)
        played = play(in_flight, EQUAL[stages], rules, MICRO_BATCHES, what)
        assert not played.deadlock


@pytest.mark.parametrize("kept", [least_in_flight, most_in_flight])
@pytest.mark.parametrize(
    "speeds",
    [
        Speeds([1.0, 0.5, 0.4], [2.0, 1.0, 0.8]),
        Speeds([0.4, 1.0], [0.8, 2.0]),
        Speeds([1.0, 2.0, 1.0, 0.1, 3.0], [2.0, 4.0, 2.0, 0.2, 6.0]),
    ],
)
def test_a_wait_for_a_neighbour_is_no_work(speeds: Speeds, kept: Callable[[int, int], int]) -> None:
    """Each stage measures what its own layers need, within 3 %: the layers move by these figures."""
    stages = len(speeds.forward_s)
    played = play([kept(stage, stages) for stage in range(stages)], speeds, Rules(message_s=0.05), MICRO_BATCHES)
    assert not played.deadlock
    for rank, work in enumerate(played.work):
        assert sum(work.passes_s) == pytest.approx(speeds.busy_s(rank, MICRO_BATCHES), rel=0.03)
        assert sum(work.passes_s) + work.waited_s == pytest.approx(played.step_s, rel=0.25)


def test_messages_on_their_way_keep_a_bounded_memory() -> None:
    """gloo's work is not completed before somebody waits for it."""
    most = [0]

    def watched(pipeline: passes.PipelinePasses, batches: list[dict[str, Any]]) -> passes.StageWork:
        channel = pipeline.neighbours.behind_out
        after_pass = pipeline.after_pass

        def count() -> None:
            after_pass()
            most[0] = max(most[0], len(channel.sent) if channel is not None else 0)

        object.__setattr__(pipeline, "after_pass", count)
        return step(pipeline, batches)

    assert not play([3, 1], EQUAL[2], Rules(message_s=0.1), MICRO_BATCHES, watched).deadlock
    assert 1 <= most[0] <= 2
