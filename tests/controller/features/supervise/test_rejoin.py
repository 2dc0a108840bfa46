"""Who plays a game on a node that was given back is not disturbed: the node is asked for nothing until it may come back."""

from __future__ import annotations

import pytest

from homelab.controller.features.supervise import rejoin
from homelab.controller.features.supervise.rejoin import RejoinMonitor
from scripts.practice.desk import wait_until
from tests import builders

pytestmark = pytest.mark.timeout(30)


def test_a_node_that_is_with_its_owner_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    looks: list[str] = []
    away = {"tower"}

    def is_well(self: RejoinMonitor, names: tuple[str, ...]) -> bool:
        asked.append(names)
        return True

    def is_away(name: str) -> bool:
        looks.append(name)
        return name in away

    monkeypatch.setattr(rejoin, "_EVERY_S", 0.01)
    monkeypatch.setattr(RejoinMonitor, "_is_well", is_well)
    with RejoinMonitor(builders.cluster(), builders.recipe(), [], ["tower"], ["laptop"], (), is_away) as monitor:
        wait_until(lambda: len(looks) > 5, 10.0)
        assert asked == [] and not monitor.well
        away.clear()
        wait_until(lambda: monitor.well == {"tower"}, 10.0)
        away.add("tower")
        wait_until(lambda: not monitor.well, 10.0)
