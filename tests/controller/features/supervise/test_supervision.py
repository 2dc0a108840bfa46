"""A fault of the supervisor itself: what it costs, and who is told."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Notify
from homelab.controller.features.status import monitor
from homelab.controller.features.supervise import attempt_watch, recovery_try, status_streams, supervision
from homelab.controller.features.supervise.supervisor import Supervisor
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.controller.features.supervise.test_supervised_run import begun, ends, events, supervise, until, written
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


def test_a_thread_that_has_ended_would_leave_a_node_unheard(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    works, faults = status_streams.StatusStreams._heard, [RuntimeError("a thread's own")]

    def hears(streams: status_streams.StatusStreams, name: str, line: bytes) -> None:
        if name == "laptop" and faults:
            raise faults.pop()
        works(streams, name, line)

    monkeypatch.setattr(status_streams.StatusStreams, "_heard", hears)
    ends(fleet, 0)
    fleet.nodes["tower"].streams["follow"] = [builders.raw_status()]
    future = begun(fleet, paths)
    until(lambda: bool(events(paths, "note")))
    ends(fleet, 0)
    fleet.nodes["tower"].say(builders.raw_end(0))
    assert future.result(30) == "done"
    assert "began again: RuntimeError: a thread's own" in events(paths, "note")[0]["text"]


def test_one_that_cannot_begin_again_at_once_tries_again(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it needs for that may be in the way, too: a disk that is full, a folder that somebody has deleted."""
    works, built = Supervisor.__init__, list[int]()

    def init(self: Supervisor, *parts: Any) -> None:
        built.append(len(built))
        if len(built) == 2:
            raise OSError("the disk is full")
        works(self, *parts)

    looks, faults = attempt_watch.AttemptWatch.look, [RuntimeError("a fault")]

    def look(watch: attempt_watch.AttemptWatch) -> Any:
        if faults:
            raise faults.pop()
        return looks(watch)

    monkeypatch.setattr(supervision, "AGAIN_S", 0.01)
    monkeypatch.setattr(Supervisor, "__init__", init)
    monkeypatch.setattr(attempt_watch.AttemptWatch, "look", look)
    ends(fleet, 0)
    assert supervise(fleet, paths) == "done"
    assert len(built) == 3 and len(events(paths, "note")) == 2


def test_a_run_that_cannot_be_read_is_said_at_once(fleet: FakeFleet, paths: RunPaths) -> None:
    paths.run_json.write_text("{")
    with pytest.raises(HomelabError, match="damaged"):
        supervise(fleet, paths)
    assert events(paths, "note") == []


def test_connections_that_were_handed_over_are_closed_without_a_question(fleet: FakeFleet, paths: RunPaths) -> None:
    supervisor, connected = Supervisor(fleet.cluster, paths, lambda text: None), Fleet(fleet.cluster)
    assert connected.ask("free-port")[0] and connected._agents
    one = recovery_try.RecoveryTry(supervisor._run, supervisor._plan, None, lambda text: None, 0.0, connected=connected)  # type: ignore[arg-type]
    one.close()
    assert not connected._agents
    supervisor._leaves.close()


def test_what_this_machine_refuses_is_said_without_a_traceback(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    works, faults = attempt_watch.AttemptWatch.look, [HomelabError("the disk is full", where="/", hint="df /")]

    def look(watch: attempt_watch.AttemptWatch) -> Any:
        if faults:
            raise faults.pop()
        return works(watch)

    monkeypatch.setattr(attempt_watch.AttemptWatch, "look", look)
    ends(fleet, 0)
    said: list[str] = []
    assert supervise(fleet, paths, said) == "done"
    assert any("df /" in line for line in said) and not any("Traceback" in line for line in said)


def test_a_fault_that_comes_again_and_again_is_told(fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    told = paths.root / "told"
    notify = Notify(command=f"cat > '{told}'", on=["needs you"])  # type: ignore[arg-type]
    monkeypatch.setattr(fleet, "cluster", fleet.cluster.model_copy(update={"notify": notify}))
    monkeypatch.setattr(attempt_watch.AttemptWatch, "look", lambda watch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervise(fleet, paths)
    assert [line["text"].split(":")[0] for line in events(paths, "note")] == [
        "the supervisor met a fault of its own and began again",
        "the supervisor met a fault of its own and began again",
        "the supervisor has ended by a fault of its own",
    ]
    assert "a fault of its own: ZeroDivisionError: division by zero\nNobody looks after the run now" in told.read_text()
    assert f"to start another supervisor: homelab supervise {paths.name}" in told.read_text()


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
