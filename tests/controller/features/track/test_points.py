"""Of every step one point, whatever recoveries computed again."""

from __future__ import annotations

import math
from typing import Literal

import pytest

from homelab.controller.features.track.points import TrackedPoint, first_changed, points_of
from tests.controller.features.track.metric_lines import evaluation, train

pytestmark = pytest.mark.timeout(20)


def test_of_every_step_one_point_in_order_of_the_newest_attempt() -> None:
    lines = [
        train(1, 1),
        train(1, 3),
        train(2, 2),
        evaluation(1, 2),
        train(1, 2),
        train(1, 1, rank=1),
        {"kind": "note", "rank": 0, "step": 9},
    ]
    points = points_of(lines)
    assert [(*point.key, point.attempt) for point in points] == [("train", 1, 1), ("train", 2, 2), ("eval", 2, 1), ("train", 3, 1)]
    assert points[1].values["train/loss"] == train(2, 2)["loss"]
    assert points[2].values == {"eval/loss": 4.0, "eval/perplexity": math.exp(4.0)}


def test_a_figure_that_is_unknown_or_not_finite_is_left_out() -> None:
    point = points_of([train(1, 1) | {"loss": math.nan, "grad_norm": None, "perplexity": math.inf}])[0]
    assert not {"train/loss", "train/grad_norm", "train/perplexity"} & set(point.values) and "train/learning_rate" in point.values


def point(step: int, attempt: int = 1) -> TrackedPoint:
    return TrackedPoint("train", step, attempt, 0.0, {})


def test_the_first_step_that_is_not_as_it_was_sent() -> None:
    sent: dict[tuple[Literal["train", "eval"], int], int] = {("train", step): 1 for step in range(1, 6)}
    assert first_changed([point(step) for step in range(1, 9)], sent) is None
    assert first_changed([*map(point, range(1, 4)), point(4, 2)], sent) == 4, "step 5 is not computed again yet, and 4 is"
    assert first_changed([*map(point, range(1, 4))], sent) == 4
    del sent["train", 2]
    assert first_changed([point(step) for step in range(1, 6)], sent) == 2, "its line came late"
    assert first_changed([], {}) is None
