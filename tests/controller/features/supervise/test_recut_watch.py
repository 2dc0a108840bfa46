"""When the nodes of a pipeline are asked for their speeds: once after each checkpoint, and only where the time of a start was seen."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.features.supervise.recut_watch import RecutWatch
from homelab.shared.protocol.rank_messages import RankStatus
from tests import builders

NAMES = builders.NAMES[:2]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The checkpoints after which the nodes were asked."""
    checkpoints: list[int] = []
    monkeypatch.setattr(RecutWatch, "_ask", lambda self, checkpoint, restart_s: checkpoints.append(checkpoint))
    return checkpoints


def watch() -> RecutWatch:
    plan: Any = builders.make_plan(builders.cluster(NAMES), builders.recipe(), {name: builders.facts(name) for name in NAMES})
    return RecutWatch(builders.cluster(NAMES), builders.recipe(), [], plan)


def see(watching: RecutWatch, phase: str, checkpoint: int) -> None:
    watching.see({name: NodeStatus(attempt=1, ranks={number: RankStatus(phase=phase)}) for number, name in enumerate(NAMES)}, checkpoint)
    for thread in threading.enumerate():
        if thread.name == "recut":
            thread.join(5)


def test_once_after_each_checkpoint(asked: list[int]) -> None:
    watching = watch()
    for phase, checkpoint in [
        ("loading", 0),
        ("training", 0),
        ("training", 10),
        ("saving", 10),
        ("training", 10),
        ("training", 20),
        ("evaluating", 20),
    ]:
        see(watching, phase, checkpoint)
    assert asked == [10, 20]


def test_not_by_a_supervisor_that_came_while_it_trained(asked: list[int]) -> None:
    """It does not know how long a start takes."""
    watching = watch()
    for phase, checkpoint in [("training", 0), ("training", 10), ("training", 20)]:
        see(watching, phase, checkpoint)
    assert asked == []


def test_what_was_said_of_an_earlier_checkpoint_counts_no_more(asked: list[int]) -> None:
    watching = watch()
    see(watching, "loading", 0)
    see(watching, "training", 10)
    watching.because = "a step takes 2 s with other layers"
    see(watching, "training", 10)
    assert watching.because
    see(watching, "training", 20)
    assert not watching.because
