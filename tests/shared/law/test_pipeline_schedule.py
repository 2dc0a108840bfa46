"""Every micro-batch goes forward and backward once, in order, and no stage holds more than it may."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from homelab.shared.law.pipeline_schedule import POSTED, UNDER_WAY, Action, least_in_flight, most_in_flight, never_stuck, order


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 7])
def test_each_pass_once_and_no_more_in_flight(micro_batches: int, in_flight: int) -> None:
    actions = order(micro_batches, in_flight)
    for kind in ("forward", "backward"):
        assert [action.micro_batch for action in actions if action.kind == kind] == list(range(micro_batches))
    held, most = 0, 0
    for action in actions:
        held += 1 if action.kind == "forward" else -1
        most = max(most, held)
    assert held == 0 and most == min(in_flight, micro_batches)


def test_the_last_stage_goes_back_at_once() -> None:
    assert [(kind[0], index) for kind, index in order(3, 1)] == [("f", 0), ("b", 0), ("f", 1), ("b", 1), ("f", 2), ("b", 2)]
    assert [(kind[0], index) for kind, index in order(4, 3)] == [
        ("f", 0),
        ("f", 1),
        ("f", 2),
        ("b", 0),
        ("f", 3),
        ("b", 1),
        ("b", 2),
        ("b", 3),
    ]


def test_in_flight_grows_towards_the_first_stage() -> None:
    assert [least_in_flight(stage, 4) for stage in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(stage, 4) for stage in range(4)] == [7, 5, 3, 1]


def ends(micro_batches: int, in_flight: Sequence[int]) -> bool:
    """Play a step: gloo ends a send when its receive is posted, and a stage that sends one more waits for the oldest but so many."""
    orders = [order(micro_batches, most) for most in in_flight]
    done = [0] * len(orders)
    taken = {(kind, stage): 0 for kind in ("forward", "backward") for stage in range(len(orders))}

    def goes_on(stage: int) -> bool:
        kind, index = orders[stage][done[stage]]
        step = 1 if kind == "forward" else -1
        source, target = stage - step, stage + step
        if 0 <= source < len(orders) and orders[source].index(Action(kind, index)) >= done[source]:
            return False  # nothing has come yet
        taken[kind, stage] = index + 1
        return not 0 <= target < len(orders) or index + 1 - UNDER_WAY <= taken[kind, target] + POSTED

    while any(gone_on := [done[stage] < len(own) and goes_on(stage) for stage, own in enumerate(orders)]):
        for stage, one in enumerate(gone_on):
            done[stage] += one
    return all(count == len(own) for count, own in zip(done, orders, strict=True))


@pytest.mark.parametrize("stuck", [(11, 1, 1, 1, 1, 1), (11, 2, 2, 2, 2, 1), (13, 4, 4, 4, 4, 3, 1), (19, 9, 8, 7, 6, 5, 4, 3, 2, 1)])
def test_two_stages_that_send_to_each_other_do_not_wait_for_each_other(stuck: tuple[int, ...]) -> None:
    """A first card with much room before cards with little."""
    assert not ends(40, stuck) and ends(40, never_stuck(stuck))


def test_no_layout_is_stuck() -> None:
    numbers = random.Random(7)
    for _ in range(200):
        stages = numbers.randint(2, 10)
        wanted = sorted((numbers.randint(1, most_in_flight(stage, stages)) for stage in range(stages)), reverse=True)
        assert ends(numbers.randint(1, 40), never_stuck(wanted)), wanted


def test_what_never_waits_stays() -> None:
    for stages in range(1, 9):
        full = tuple(most_in_flight(stage, stages) for stage in range(stages))
        assert never_stuck(full) == full
