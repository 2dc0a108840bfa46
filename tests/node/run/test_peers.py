"""Who is missed: only who ever answered, and not while steps are done."""

from __future__ import annotations

import time
from typing import Any

import pytest

from homelab.node.run import peer_probe
from homelab.shared.protocol.rank_messages import RankStatus
from scripts.practice.desk import wait_until

pytestmark = pytest.mark.timeout(30)

NAMES = ("node2", "node3")


def test_only_who_has_answered_once_can_be_missed() -> None:
    missed = peer_probe.Missed()
    missed.dialled(10.0, NAMES, {"node2"})
    assert missed.seconds(11.0) == {"node2": 0.0}, "a firewall before node3 says nothing"
    missed.dialled(12.0, NAMES, set())
    missed.dialled(14.0, NAMES, set())
    assert missed.seconds(15.0) == {"node2": 3.0}, "since the first dial in vain"
    missed.dialled(16.0, NAMES, {"node2", "node3"})
    assert missed.seconds(17.0) == {"node2": 0.0, "node3": 0.0}


def test_a_step_proves_that_all_are_there() -> None:
    missed = peer_probe.Missed()
    missed.dialled(10.0, NAMES, set(NAMES))
    missed.dialled(11.0, NAMES, set())
    missed.forgive()
    assert missed.seconds(20.0) == {"node2": 0.0, "node3": 0.0}
    missed.dialled(21.0, NAMES, set())
    assert missed.seconds(23.0) == {"node2": 2.0, "node3": 2.0}


def test_a_refusal_is_an_answer_and_a_name_that_is_no_address_is_none() -> None:
    assert peer_probe.reached({"node2": "127.0.0.1", "node3": "nowhere"}, 5.0) == {"node2"}


def rank(**changes: Any) -> dict[int, RankStatus]:
    return {0: RankStatus(phase="training", step=3, still_s=0.2, step_still_s=0.4).replace(**changes)}


@pytest.mark.parametrize(
    ("ranks", "dials"),
    [
        (rank(), False),
        (rank(step_still_s=3.0), True),  # a pass since then proves nothing: it needs nobody
        (rank(step=0), True),
        (rank(phase="loading"), True),
        (rank() | {1: RankStatus(phase="evaluating", step=3, still_s=0.1, step_still_s=0.1)}, True),
        ({}, True),
    ],
    ids=["steps", "stands still", "first step", "loads", "one evaluates", "any program"],
)
def test_it_dials_while_no_step_is_done(monkeypatch: pytest.MonkeyPatch, ranks: dict[int, RankStatus], dials: bool) -> None:
    asked: list[object] = []
    monkeypatch.setattr(peer_probe, "reached", lambda addresses, timeout_s: asked.append(addresses) or set(addresses))
    here = peer_probe.Peers({"node2": "127.0.0.1"})
    if dials:
        wait_until(lambda: here.look(ranks, time.monotonic()) == {"node2": 0.0}, 5.0)
    else:
        for _ in range(20):
            assert here.look(ranks, time.monotonic()) == {} and not asked
            time.sleep(0.01)  # its thread had time to


def test_a_step_ends_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"node2"}
    monkeypatch.setattr(peer_probe, "reached", lambda addresses, timeout_s: set(there))
    monkeypatch.setattr(peer_probe, "_EVERY_S", 0.01)
    here = peer_probe.Peers({"node2": "127.0.0.1"})
    wait_until(lambda: here.look(rank(phase="loading"), time.monotonic()) == {"node2": 0.0}, 5.0)
    there.clear()
    wait_until(lambda: here.look(rank(phase="loading"), time.monotonic())["node2"] > 0.05, 5.0)
    assert here.look(rank(step_still_s=0.0), time.monotonic()) == {"node2": 0.0}
