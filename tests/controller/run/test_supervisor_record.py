"""What a supervisor takes over from the one before it."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.run import supervisor_record

RESTART = {"at": 9.0, "cause": "killed", "node": "tower", "resume_step": 40}


def record(doing: str) -> dict[str, Any]:
    return {"doing": doing, "attempt": 3, "step_s": 2.0, "restarts": [RESTART]}


@pytest.mark.parametrize(
    ("doing", "attempt_now", "counts"),
    [
        ("watching", 3, True),
        ("watching", None, True),
        ("recovering", 4, True),  # it was killed between the start and its word of it
        ("given up", 4, False),
        ("watching", 4, False),
        ("ended", 5, False),
    ],
)
def test_what_was_tried_counts_until_a_person_has_recovered_the_run(doing: str, attempt_now: int | None, counts: bool) -> None:
    """Also from another machine, which cannot write this one's record."""
    history = supervisor_record.valid_history(record(doing), attempt_now)
    (kept,) = history["restarts"]
    assert (kept["resume_step"], kept["at"]) == ((40, 9.0) if counts else (-1, 0.0))
    assert history["step_s"] == 2.0
