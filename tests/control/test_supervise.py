"""What the supervisor does with what it sees, without a node: its followers are played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.config.cluster import Cluster
from homelab.control import find, supervise
from homelab.runs import store
from homelab.runs.paths import RunPaths
from homelab.runs.reply import Exit
from homelab.runs.signs import RankSign, Sign

pytestmark = pytest.mark.timeout(30)

NODES = ("tower", "laptop")
PLAN = SimpleNamespace(attempt=1, resume_step=0, step_s=None, nodes=[SimpleNamespace(name=name) for name in NODES])
TRAINS = RankSign(pid=7, state="S", phase="saving", step=36)
GONE = RankSign(pid=7, state="", phase="saving", step=36)
DONE = RankSign(pid=7, state="", phase="done", step=36)


def signs(**of_node: dict[str, Any]) -> dict[str, Sign]:
    usual = {"attempt": 1, "newest": 1, "started": True, "agent": "S", "torchrun": "S", "ranks": {0: TRAINS}}
    return {name: Sign(**{**usual, **of_node.get(name, {})}) for name in NODES}


class Played:
    """Followers that hear one look after the other; the last one stays."""

    def __init__(self, *looks: dict[str, Sign]) -> None:
        self._looks = list(looks)

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def signs(self) -> dict[str, Sign]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.001)


class Recovered(Exception):
    """The supervisor began a recovery."""


@pytest.fixture
def paths(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPaths]:
    """The folder of a run that trains; whoever recovers it raises, and nothing is waited for."""
    found = RunPaths(tmp_path / "2026-run")
    found.root.mkdir()
    recipe = SimpleNamespace(recovery=SimpleNamespace(rejoin="never"), script=None, method=None)
    monkeypatch.setattr(find, "recipe_of", lambda paths: ({}, recipe))
    monkeypatch.setattr(find, "plan_of", lambda paths: PLAN)
    monkeypatch.setattr(supervise.recover, "material_of", lambda paths, described: [])
    monkeypatch.setattr(supervise.by_hand, "skipped", lambda paths: ())
    monkeypatch.setattr(supervise, "SETTLE_S", 0.01)
    monkeypatch.setattr(supervise.Supervisor, "_look", lambda self: None)
    monkeypatch.setattr(supervise.Supervisor, "_clean", lambda self, names: None)

    def recovers(*_: object) -> bool:
        raise Recovered

    monkeypatch.setattr(supervise.Supervisor, "_recover", recovers)
    yield found


def run(paths: RunPaths, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Sign]) -> str:
    monkeypatch.setattr(supervise.Supervisor, "_followers", lambda self, plan: Played(*looks))
    cluster = Cluster.model_validate({"name": "attic", "nodes": tuple({"name": name, "host": name} for name in NODES)})
    return supervise.Supervisor(cluster, paths, lambda text: None).run()


WELL_ENDED = signs(**{name: {"exit": Exit(returncode=0), "agent": "", "torchrun": "", "ranks": {0: DONE}} for name in NODES})
FAILED = signs(**{name: {"exit": Exit(returncode=1), "agent": "", "torchrun": "", "ranks": {0: GONE}} for name in NODES})


def test_a_run_that_turns_out_done_is_not_started_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(paths, monkeypatch, signs(), signs(laptop={"ranks": {0: GONE}}), WELL_ENDED) == "done"
    assert store.events(paths) == [], "and nothing of any trouble is written down"
    one_by_one = signs(laptop={"exit": Exit(returncode=0), "ranks": {0: DONE}, "agent": "", "torchrun": ""})
    assert run(paths, monkeypatch, signs(), signs(laptop={"ranks": {0: GONE}}), one_by_one, one_by_one, WELL_ENDED) == "done"


def test_a_rank_that_died_is_recovered(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Recovered):
        run(paths, monkeypatch, signs(), signs(laptop={"ranks": {0: GONE}}), FAILED)


def test_a_supervisor_that_follows_one_that_was_ended_while_it_recovered_a_finished_run(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_json(paths.supervisor_json, {"doing": "recovering", "attempt": 1, "restarts": []})
    assert run(paths, monkeypatch, WELL_ENDED) == "done"
    store.write_json(paths.supervisor_json, {"doing": "recovering", "attempt": 1, "restarts": []})
    with pytest.raises(Recovered):
        run(paths, monkeypatch, FAILED)
