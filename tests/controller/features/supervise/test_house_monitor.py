"""Owners are asked in the background, whatever this machine lacks for a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.controller.features.supervise import house_monitor
from homelab.controller.features.supervise.house_monitor import HouseMonitor
from homelab.controller.remote.fanout import Fleet
from scripts.practice.desk import wait_until
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)


def test_a_node_is_asked_again_after_a_fault_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [BlockingIOError("no processes"), OSError("no room"), RuntimeError("can't start new thread")]

    def house(request: dict[str, Any]) -> dict[str, Any]:
        return {"minute": 600}

    fleet = FakeFleet(tmp_path, ["tower"], builders.cluster().only(("tower",))).answer("house", house).replace_connections(monkeypatch)
    ask = Fleet.ask

    def fails_first(*parts: Any, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return ask(*parts, **more)

    monkeypatch.setattr(Fleet, "ask", fails_first)
    monkeypatch.setattr(house_monitor, "ASK_S", 0.01)
    said: list[str] = []
    monitor = HouseMonitor(fleet.cluster, builders.RUN, dict, lambda name: False, said.append)
    try:
        wait_until(lambda: "tower" in monitor.sights(), 10.0)
    finally:
        monitor.close()
    assert len(said) == 3 and "no room" in said[1]
