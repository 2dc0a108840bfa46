"""Every micro-batch goes forward and backward once, in order, and no stage holds more than it may."""

from __future__ import annotations

import pytest

from homelab.shared.law.pipeline_schedule import least_in_flight, most_in_flight, order


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
