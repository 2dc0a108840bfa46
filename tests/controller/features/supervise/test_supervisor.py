"""What the supervisor does with what it sees, without a node: its streams are played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.attempt import inputs
from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.supervise import attempt_watch, supervisor
from homelab.controller.run import event_log, run_folder, store
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.run_folder import Description
from homelab.shared.protocol.rank_messages import RankStatus
from homelab.shared.protocol.run_messages import Exit
from homelab.shared.recipe import Checkpoint, Recovery

pytestmark = pytest.mark.timeout(30)

NODES = ("tower", "laptop")
PLAN = SimpleNamespace(attempt=1, strategy="ddp", resume_step=0, step_s=None, nodes=[SimpleNamespace(name=name) for name in NODES])
TRAINS = RankStatus(pid=7, state="S", phase="saving", step=36)
GONE = RankStatus(pid=7, state="", phase="saving", step=36)
DONE = RankStatus(pid=7, state="", phase="done", step=36)


def statuses(**of_node: dict[str, Any]) -> dict[str, NodeStatus]:
    usual = {"attempt": 1, "newest": 1, "started": True, "agent": "S", "torchrun": "S", "ranks": {0: TRAINS}}
    return {name: NodeStatus(**{**usual, **of_node.get(name, {})}) for name in NODES}


class Played:
    """Streams that hear one look after the other; the last one stays."""

    fault: Exception | None = None

    def __init__(self, *looks: dict[str, NodeStatus]) -> None:
        self._looks = list(looks)

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def statuses(self) -> dict[str, NodeStatus]:
        return self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]

    def wait(self, timeout_s: float) -> None:
        time.sleep(0.001)


class Recovered(Exception):
    """The supervisor began a recovery."""


@pytest.fixture
def paths(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunPaths]:
    """The folder of a run that trains; whoever recovers it raises, and nothing is waited for."""
    folder = RunPaths(tmp_path / "2026-run")
    folder.root.mkdir()
    recipe = SimpleNamespace(recovery=Recovery(rejoin="never"), checkpoint=Checkpoint(), script=None, method=None)
    monkeypatch.setattr(run_folder, "description_of", lambda paths: Description({}, recipe))  # type: ignore[arg-type]
    monkeypatch.setattr(run_folder, "plan_of", lambda paths: PLAN)
    monkeypatch.setattr(inputs, "of_run", lambda paths, run_json: [])
    monkeypatch.setattr(attempt_watch, "SETTLE_S", 0.01)
    monkeypatch.setattr(supervisor.Supervisor, "_collect", lambda self, fleet: None)
    monkeypatch.setattr(supervisor.Supervisor, "_stop_ranks", lambda self, names: None)

    def begins(*_: object) -> None:
        raise Recovered

    monkeypatch.setattr(supervisor.Supervisor, "_begin", begins)
    yield folder


def run(paths: RunPaths, monkeypatch: pytest.MonkeyPatch, *looks: dict[str, NodeStatus]) -> str:
    monkeypatch.setattr(supervisor.Supervisor, "_streams", lambda self: Played(*looks))
    cluster = Cluster.model_validate({"name": "attic", "nodes": tuple({"name": name, "host": name} for name in NODES)})
    return supervisor.Supervisor(cluster, paths, lambda text: None).run()


WELL_ENDED = statuses(**{name: {"exit": Exit(returncode=0), "agent": "", "torchrun": "", "ranks": {0: DONE}} for name in NODES})
FAILED = statuses(**{name: {"exit": Exit(returncode=1), "agent": "", "torchrun": "", "ranks": {0: GONE}} for name in NODES})


def test_a_run_that_turns_out_done_is_not_started_again(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(paths, monkeypatch, statuses(), statuses(laptop={"ranks": {0: GONE}}), WELL_ENDED) == "done"
    assert event_log.lines(paths) == [], "and nothing of any trouble is written down"
    one_by_one = statuses(laptop={"exit": Exit(returncode=0), "ranks": {0: DONE}, "agent": "", "torchrun": ""})
    assert run(paths, monkeypatch, statuses(), statuses(laptop={"ranks": {0: GONE}}), one_by_one, one_by_one, WELL_ENDED) == "done"


def test_a_rank_that_died_is_recovered(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Recovered):
        run(paths, monkeypatch, statuses(), statuses(laptop={"ranks": {0: GONE}}), FAILED)


def test_a_supervisor_that_follows_one_that_was_ended_while_it_recovered_a_finished_run(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write_json(paths.supervisor_json, {"doing": "recovering", "attempt": 1, "restarts": []})
    assert run(paths, monkeypatch, WELL_ENDED) == "done"
    store.write_json(paths.supervisor_json, {"doing": "recovering", "attempt": 1, "restarts": []})
    with pytest.raises(Recovered):
        run(paths, monkeypatch, FAILED)
