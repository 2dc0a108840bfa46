"""A fault of the supervisor itself: what it costs, and who is told."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.cluster import Notify
from homelab.controller.features.status import monitor
from homelab.controller.features.supervise import attempt_watch, recovery_try
from homelab.controller.features.supervise.supervisor import Supervisor
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests.controller.features.supervise.test_supervised_run import ends, events, supervise, written
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("of", "name"),
    [(attempt_watch.AttemptWatch, "look"), (recovery_try.RecoveryTry, "halt"), (recovery_try.RecoveryTry, "close"), (Fleet, "__exit__")],
)
def test_a_fault_of_its_own_costs_a_new_supervisor_and_no_run(
    fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, of: type, name: str
) -> None:
    """While it watches, while it has claimed the run, and while it closes."""
    works, faults = getattr(of, name), [RuntimeError("dictionary changed size during iteration")]

    def fails_once(*of_it: Any, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return works(*of_it, **more)

    monkeypatch.setattr(of, name, fails_once)
    ends(fleet, 1)
    said: list[str] = []
    assert supervise(fleet, paths, said) == "given up"
    assert written(paths) == ("given up", "failed")
    notes = [line["text"] for line in events(paths, "note")]
    assert notes == ["the supervisor met a fault of its own and began again: RuntimeError: dictionary changed size during iteration"]
    assert sum("Traceback" in line for line in said) == 1
    assert sorted(fleet.verbs("claim")) == sorted(fleet.verbs("release")), "a claim of the first would keep the second away"
    assert not supervisor_lock.is_held(paths)


def test_a_fault_that_comes_again_and_again_is_told(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    told = paths.root / "told"
    notify = Notify(command=f"cat > '{told}'", on=["needs you"])  # type: ignore[arg-type]
    monkeypatch.setattr(fleet, "cluster", fleet.cluster.model_copy(update={"notify": notify}))
    monkeypatch.setattr(attempt_watch.AttemptWatch, "look", lambda watch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervise(fleet, paths)
    assert len(events(paths, "note")) == 2
    assert f"a fault of its own: ZeroDivisionError: division by zero\nhomelab supervise {paths.name}" in told.read_text()


def test_a_look_beside_a_recovery_leaves_no_connection_open(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(watcher: monitor.Watcher, over: Fleet) -> None:
        assert over.ask("free-port")[0] and over._agents
        over.__exit__()  # the recovery has ended meanwhile
        assert over.ask("free-port")[0] and over._agents

    monkeypatch.setattr(monitor.Watcher, "look", look)
    said: list[str] = []
    one = Supervisor(fleet.cluster, paths, said.append)
    connections = one._connections()
    one._collect(connections)
    one._leaves.close()
    assert not said and not connections._agents
