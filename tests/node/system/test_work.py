"""Whether a rank works where it says nothing for long: by the processor time and the bytes of its process."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from homelab.node.run import status_stream
from homelab.node.system import process_activity

pytestmark = pytest.mark.timeout(30)


def looks(monkeypatch: pytest.MonkeyPatch, *used: tuple[float, int] | None, every_s: float = process_activity.WINDOW_S) -> list[bool]:
    """What is seen of a process that has used so much at each look."""
    left = list(used)
    monkeypatch.setattr(process_activity, "used", lambda pid: left.pop(0))
    here = process_activity.Work()
    return [here.look(7, number * every_s) for number in range(len(used))]


def test_a_process_works_that_uses_the_processor_or_moves_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looks(monkeypatch, (1.0, 0), (1.1, 0), (1.2, 0)) == [False, True, True], "a twentieth of a core"
    assert looks(monkeypatch, (1.0, 0), (1.0, 1 << 20), (1.0, 2 << 20)) == [False, True, True], "a slow disk"
    assert looks(monkeypatch, (1.0, 0), (1.01, 500), (1.02, 1000)) == [False, False, False], "it waits, and wakes up to look"
    assert looks(monkeypatch, None, None) == [False, False]
    assert looks(monkeypatch, (1.0, 0), None) == [False, False], "it is gone"


def test_another_process_of_that_rank_is_counted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_activity, "used", lambda pid: (float(pid), 0))
    here = process_activity.Work()
    assert not here.look(7, 0.0) and not here.look(900, process_activity.WINDOW_S) and not here.look(900, 2 * process_activity.WINDOW_S)


def test_what_a_living_process_has_used() -> None:
    cpu_s, count_bytes = process_activity.used(os.getpid()) or (0.0, 0)
    assert cpu_s > 0 and count_bytes > 0
    assert process_activity.used(2**22 + 1) is None


@pytest.mark.parametrize(("phase", "still_s"), [("loading", 0.0), ("saving", 0.0), ("training", 10.0), ("evaluating", 10.0)])
def test_work_counts_while_a_rank_loads_and_not_in_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, still_s: float
) -> None:
    """Who waits for a peer in a step may keep the processor busy; there a pass is the sign."""
    folder = tmp_path / "runs" / "r" / "attempts" / "1"
    (folder / "ranks" / "0").mkdir(parents=True)
    nodes: list[Any] = [{"name": "node1", "lan_address": "127.0.0.1"}]
    (folder / "plan.json").write_text(json.dumps({"nodes": nodes, "ranks": [{"rank": 0, "node": "node1", "local_rank": 0}]}))
    (folder / "ranks" / "0" / "heartbeat.json").write_text(json.dumps({"pid": os.getpid(), "phase": phase, "step": 3}))
    cpu_s = iter(range(100))
    monkeypatch.setattr(process_activity, "used", lambda pid: (float(next(cpu_s)), 0))
    here = status_stream.StatusFollower(str(tmp_path), "r", 1, "node1")
    for now_s in (0.0, 0.1):
        here.look(now_s)
    seen = here.look(10.0).ranks[0]
    assert (seen.still_s, seen.step_still_s) == (still_s, 10.0)
