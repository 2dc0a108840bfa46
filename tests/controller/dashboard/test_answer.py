"""The first line of the dashboard: one sentence for each state."""

from __future__ import annotations

import math
from typing import Any

import pytest

from homelab.controller.dashboard import answer
from homelab.controller.dashboard.snapshot import GivenBack, Snapshot
from tests.controller.dashboard import sample, test_view

RUNNING = sample.snapshot()
AWAY = (GivenBack(name="oldtower", until="23:00"),)
PROGRAM = RUNNING.model_copy(
    update={
        "step": 0,
        "total_steps": None,
        "loss": None,
        "eta_s": None,
        "ranks": tuple(row.model_copy(update={"phase": ""}) for row in RUNNING.ranks),
    }
)


def alone(shot: Snapshot) -> dict[str, Any]:
    return {"nodes": shot.nodes[:1], "ranks": shot.ranks[:1]}


@pytest.mark.parametrize(
    ("shot", "update", "said"),
    [
        (RUNNING, {}, "● trains: step 412 of 1000, 40 min left, 3 of 3 nodes well"),
        (RUNNING, alone(RUNNING), "● trains: step 412 of 1000, 40 min left, 1 of 1 node well"),
        (RUNNING, {"eta_s": None, "total_steps": None}, "● trains: step 412, 3 of 3 nodes well"),
        (RUNNING, {"loss": math.nan}, "● trains: step 412 of 1000, 40 min left, the loss is not a number, 3 of 3 nodes well"),
        (RUNNING, {"state": "starting", "step": 0, "eta_s": None}, "○ starts: no step yet, 3 of 3 nodes well"),
        (RUNNING, {"state": "stopping", "eta_s": None}, "■ stops: step 412 of 1000, 3 of 3 nodes well"),
        (RUNNING, {"state": "stopped", "eta_s": None}, "■ stopped: step 412 of 1000, loss 1.177"),
        (RUNNING, {"state": "done", "step": 1000, "eta_s": None}, "✓ done: step 1000 of 1000, loss 1.177"),
        (RUNNING, {"state": "lost", "eta_s": None, "nodes": ()}, "? lost: step 412 of 1000, 0 of 0 nodes answered"),
        (test_view.failed(), {}, "✗ failed: step 412 of 1000, the disk of laptop is full"),
        (test_view.failed(), {"diagnosis": None}, "✗ failed: step 412 of 1000, 1 of 3 nodes well"),
        (test_view.many(10), {}, "● trains: step 412 of 1000, 40 min left, 9 of 10 nodes well"),
        (
            RUNNING,
            {"given_back": AWAY},
            "● trains: step 412 of 1000, 40 min left, 3 of 3 nodes well, oldtower was given back to its owner until 23:00",
        ),
        (
            RUNNING,
            {"state": "starting", "given_back": AWAY, "waits_for_owner": True},
            "○ waits: step 412 of 1000, oldtower was given back to its owner until 23:00",
        ),
        (
            RUNNING,
            {"given_back": (GivenBack(name="tower", because="steam runs there"),)},
            "● trains: step 412 of 1000, 40 min left, 3 of 3 nodes well, tower was given back to its owner: steam runs there",
        ),
        (PROGRAM, {}, "● runs: 3 of 3 nodes well"),
        (PROGRAM, {"state": "done"}, "✓ done: on 3 nodes"),
        (PROGRAM, {"state": "starting"}, "○ starts: no step yet, 3 of 3 nodes well"),
    ],
)
def test_each_state_has_one_sentence(shot: Snapshot, update: dict[str, Any], said: str) -> None:
    assert answer.line(shot.model_copy(update=update)).plain == said


def test_who_is_not_well_is_red_and_who_is_silent_is_named() -> None:
    ranks = tuple(row.model_copy(update={"heartbeat_age_s": 200.0}) for row in RUNNING.ranks[:2])
    line = answer.line(test_view.many(10).model_copy(update={"ranks": ranks}))
    assert line.plain.endswith("9 of 10 nodes well, ranks 0, 1 silent")
    styles = {line.plain[span.start : span.end]: str(span.style) for span in line.spans}
    assert styles["9 of 10 nodes well"] == "bold red" and styles["ranks 0, 1 silent"] == "yellow"
