"""What a tracker has got, what it gets next, and when it is tried again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from homelab.controller.features.track import forwarder, sent
from homelab.controller.features.track.points import Key, points_of
from tests.controller.features.track.metric_lines import evaluation, train

pytestmark = pytest.mark.timeout(20)


def save(step: int, *, attempt: int = 1, rank: int = 0, in_background: bool = False) -> dict[str, Any]:
    return {"kind": "save", "attempt": attempt, "rank": rank, "step": step, "time": 1.0, "in_background": in_background}


def test_a_point_is_due_once_whoever_computes_it_again() -> None:
    points = points_of([train(1, 1), train(2, 2), train(2, 3), evaluation(2, 2)])
    known: dict[Key, int] = {("train", 1): 1, ("train", 2): 1}
    assert [point.key for point in sent.due(points, known)] == [("eval", 2), ("train", 3)]
    assert sent.repeated(points, known) == 1, "the tracker has the loss of attempt 1 at step 2"


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ([], 0),
        ([train(1, 7)], 0),
        ([save(5), save(10)], 10),
        ([save(5), save(10, rank=1)], 5),  # rank 0's own lines are not here yet
        ([save(5), save(10, in_background=True)], 5),
        ([save(5, in_background=True)], 0),
        ([save(10, in_background=True), save(15, attempt=2)], 15),
    ],
    ids=["nothing", "no checkpoint", "the newest", "another rank", "one that is being written", "the first one", "of a later attempt"],
)
def test_what_a_checkpoint_holds_is_certain(lines: list[dict[str, Any]], step: int) -> None:
    assert sent.certain_step(lines) == step


def test_what_was_sent_is_kept_as_short_spans() -> None:
    known: dict[Key, int] = {("train", step): 1 if step < 900 else 2 for step in range(1, 1001) if step != 17}
    known |= {("eval", step): 1 for step in range(50, 1001, 50)}
    spans = sent.spans(known)
    assert len(spans) == 4, spans
    assert sent.attempts_of(json.loads(json.dumps(spans))) == known


@pytest.mark.parametrize(
    "damaged", [None, 3, [["train", 1]], [["train", 1, 9, 0, 1]], [["other", 1, 9, 1, 1]], [["train", 1, 10**12, 1, 1]], ["train"]]
)
def test_a_damaged_state_counts_as_nothing_sent(damaged: object) -> None:
    assert sent.attempts_of(damaged) == {}


def test_a_tracker_that_is_down_is_tried_less_and_less_often() -> None:
    waits = [forwarder.retry_wait_s(failures) for failures in range(1, 12)]
    assert waits[:3] == [2.0, 4.0, 8.0] and waits == sorted(waits) and waits[-1] == 300.0
    assert not forwarder.gives_up_after(1000, None, is_patient=False), "never while the run lives"
    assert [forwarder.gives_up_after(failures, 5.0, is_patient=False) for failures in (3, 4)] == [False, True]
    assert [forwarder.gives_up_after(50, since_end_s, is_patient=True) for since_end_s in (3600.0, 25 * 3600.0)] == [False, True]
