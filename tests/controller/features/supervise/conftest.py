"""Fixtures of a whole supervisor: two nodes that are folders, and a run of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.recover import resume_guards
from homelab.controller.features.supervise import attempt_watch, status_streams, step, supervision
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.fakes import FakeFleet

NAMES = ("tower", "laptop")
PLAN = builders.plan([builders.rank_plan(number, name) for number, name in enumerate(NAMES)])


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    """Two nodes that train, and nothing is waited for."""
    monkeypatch.setattr(status_streams, "_AGAIN_S", 0.01)
    monkeypatch.setattr(attempt_watch, "SETTLE_S", 0.01)
    monkeypatch.setattr(step, "RETRY_S", (0.01,))
    monkeypatch.setattr(supervision, "AGAIN_S", 0.01)
    monkeypatch.setattr(resume_guards, "refuse_edited_recipe", lambda *_: None)
    fleet = FakeFleet(tmp_path / "nodes", NAMES).answer("free-port", {"port": builders.PORT})
    fleet.answer("checkpoints", {"good": [], "bad": {}, "run_known": True})
    for rank, name in enumerate(NAMES):
        fleet.nodes[name].streams["follow"] = [builders.raw_status(rank=rank)]
        fleet.answer("poll", builders.raw_reply(name, rank=rank, step=1, started_at=900.0), [name])
    return fleet.replace_connections(monkeypatch)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run that is not recovered: it gives up after its first failure, when all is stopped."""
    return builders.run_folder(tmp_path / "runs", recipe=builders.recipe(recovery={"auto": False}), plan=PLAN)
