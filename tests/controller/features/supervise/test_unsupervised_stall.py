"""From one look at the nodes: who stands still, and whom they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.features.status.unsupervised import detect_stall
from homelab.shared.protocol.rank_messages import Heartbeat, RankReply
from homelab.shared.protocol.run_messages import Reply, RunReply

pytestmark = pytest.mark.timeout(10)

NODES = ("tower", "laptop", "oldtower")


def reply(name: str, age_s: float, phase: str = "training", **changes: Any) -> Reply:
    ranks = {NODES.index(name): RankReply(heartbeat=Heartbeat(time=1000.0 - age_s, phase=phase, step=30))}
    run = RunReply(**{"name": "r", "attempt": 1, "agent_alive": True, "torchrun_alive": True, "ranks": ranks, **changes})
    return Reply(node=name, time=1000.0, run=run)


def look(*replies: Reply, step_s: float | None = 1.0) -> tuple[str, tuple[str, ...]] | None:
    found = detect_stall(1, NODES, {known.node: known for known in replies}, step_s)
    return (found.kind, found.nodes) if found else None


def test_who_is_not_reached_while_all_others_wait_is_named() -> None:
    assert look(reply("tower", 57.0), reply("oldtower", 57.0)) == ("silent-node", ("laptop",))
    assert look(reply("tower", 57.0), reply("oldtower", 0.5)) is None, "somebody does steps: nobody waits for the laptop"
    assert look(reply("tower", 25.0), reply("oldtower", 25.0), step_s=10.0) is None, "a slow step"
    assert look(reply("tower", 20.0), reply("oldtower", 20.0), step_s=None) is None, "the first step takes longer"


def test_a_hang_is_seen_while_all_answer() -> None:
    assert look(*(reply(name, 57.0) for name in NODES)) == ("hang", ())
    assert look(*(reply(name, 57.0, "loading") for name in NODES)) is None
    first = {name: reply(name, 400.0) for name in NODES}
    assert detect_stall(1, NODES, first, None) and detect_stall(1, NODES, first, None, planned_s=101.0) is None
    assert look(*(reply(name, 57.0, "saving") for name in NODES)) is None


def test_what_has_ended_does_not_stand_still() -> None:
    assert look(*(reply(name, 57.0, agent_alive=False, torchrun_alive=False) for name in NODES)) is None
    assert look(*(reply(name, 57.0, attempt=2) for name in NODES)) is None
    assert look() is None
