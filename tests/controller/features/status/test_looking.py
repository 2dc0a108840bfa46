"""Who looks at a run that is being recovered: nothing is ended, and nothing is taken for the end before its owner has left."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from homelab.cli.run_command import RunCommand
from homelab.controller.base.errors import InputError
from homelab.controller.dashboard import live
from homelab.controller.dashboard.live import Watched
from homelab.controller.features.recover import recover_run
from homelab.controller.features.status import logs, monitor
from homelab.controller.features.stop import stop
from homelab.controller.features.track.metrics_source import MetricsSource
from homelab.controller.run import event_log, ownership, process_owner, run_lookup, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
NAMES = ("tower", "laptop")
ENDS = ("stop", "mark-stop", "claim", "start", "undo", "supervisor-end")
PLAN = builders.plan([builders.rank_plan(number, name) for number, name in enumerate(NAMES)])
ELSEWHERE = {"by": "me on laptop, process 7", "process": {"pid": 7, "born": 1, "boot_id": "another machine", "namespace": "n"}}
NOBODY = {"supervisor": None, "claim": None, "stopped_attempt": None}

Answers = dict[str, Any]


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.0)
    return FakeFleet(tmp_path / "nodes", NAMES).answer("supervisor-look", {"supervisor": None, "owner": NOBODY})


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return builders.run_folder(tmp_path / "runs", recipe=builders.recipe(), plan=PLAN)


@dataclass
class Nodes:
    """What the nodes answer to `poll` from now on."""

    fleet: FakeFleet
    owner: Answers

    def say(self, **run_of: Answers) -> None:
        for rank, name in enumerate(NAMES):
            reply = builders.raw_reply(name, rank=rank, step=9, started_at=900.0, **run_of[name])
            self.fleet.answer("poll", {**reply, "owner": self.owner, "supervisor": self.owner.get("here")}, [name])

    def end(self, *, stopped: bool, returncode: int | None = 1, attempt: int = 1) -> None:
        end = {"returncode": returncode, "signal": None, "ended_at": 990.0, "stopped": stopped}
        gone: Answers = {"agent_alive": False, "torchrun_alive": False, "exit": end, "attempt": attempt, "final": returncode == 0}
        self.say(tower=gone, laptop=gone)


def local(paths: RunPaths, nodes: Nodes, stack: ExitStack) -> None:
    """A supervisor on this machine has its lock."""
    stack.enter_context(supervisor_lock.held(paths))
    store.write_json(paths.supervisor_json, {"doing": "recovering", "why": "rank 1 is frozen", "attempt": 1, "pid": 1})


def on_a_node(paths: RunPaths, nodes: Nodes, stack: ExitStack) -> None:
    nodes.owner["here"] = {"alive": True, "doing": "recovering", "why": "rank 1 is frozen"}


def elsewhere(paths: RunPaths, nodes: Nodes, stack: ExitStack) -> None:
    """This machine has not launched the run."""
    nodes.owner["supervisor"] = {**ELSEWHERE, "silent_s": 2.0, "has_left": False}


def by_hand_elsewhere(paths: RunPaths, nodes: Nodes, stack: ExitStack) -> None:
    nodes.owner["claim"] = {**ELSEWHERE, "doing": "recovered by hand", "age_s": 5.0}


OWNERS = [local, on_a_node, elsewhere, by_hand_elsewhere]
Own = Callable[[RunPaths, Nodes, ExitStack], None]


@pytest.fixture
def nodes(fleet: FakeFleet) -> Nodes:
    return Nodes(fleet, dict(NOBODY))


@pytest.fixture
def owned(nodes: Nodes, paths: RunPaths, request: pytest.FixtureRequest) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        request.param(paths, nodes, stack)
        yield stack


def between(nodes: Nodes) -> Iterator[str]:
    """What nodes say between two attempts, one after the other."""
    nodes.end(stopped=False)
    yield "failed"
    nodes.end(stopped=True)
    yield "all that was left is stopped"
    nodes.say(
        tower={"agent_alive": False, "torchrun_alive": False, "stop_marked_at": 990.0},
        laptop={"agent_alive": False, "torchrun_alive": False},
    )
    yield "the end is not written down yet"
    nodes.end(stopped=True)
    nodes.fleet.nodes["laptop"].is_off = True
    yield "a node is without power"
    nodes.fleet.nodes["tower"].is_off = True
    yield "nobody answers this machine"
    nodes.fleet.nodes["laptop"].is_off = nodes.fleet.nodes["tower"].is_off = False


@pytest.mark.parametrize("owned", OWNERS, indirect=True)
def test_nothing_is_over_between_two_attempts(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "STILL_S", 0.0)
    watcher, is_local = monitor.Watcher(fleet, paths), supervisor_lock.is_held(paths)
    for words in between(nodes):
        snapshot = watcher.look()
        if words == "nobody answers this machine" and not is_local:
            assert not snapshot.is_over, "the way to the nodes may be what is gone"
            continue
        assert (snapshot.state not in ("stopped", "stopping"), snapshot.is_over) == (True, False), words
        assert not logs.read(fleet, paths, None, 10).is_final, words
        assert not MetricsSource(fleet, paths).look().is_over, words
    assert fleet.verbs(*ENDS) == [] and not [line for line in event_log.lines(paths) if line["event"] == "stopped"]


@pytest.mark.parametrize("owned", OWNERS, indirect=True)
def test_to_wait_ends_with_the_run_and_its_exit_code(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, owned: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "STILL_S", 0.0)
    scenes, looks = between(nodes), 0
    seen = monitor.Watcher.look

    def look(self: monitor.Watcher) -> Any:
        nonlocal looks
        looks += 1
        if looks % 2 and next(scenes, None) is None:
            owned.close()
            nodes.owner.update(NOBODY, here=None)
            nodes.end(stopped=False, returncode=0)
        return seen(self)

    monkeypatch.setattr(monitor.Watcher, "look", look)
    command = RunCommand(Path("cluster.toml"), paths.root.parent, as_json=False)
    command.console = Console(file=io.StringIO())
    assert command.wait(fleet, paths) == 0
    assert looks >= 11 and fleet.verbs(*ENDS) == []


@pytest.mark.parametrize(("say", "code"), [
    (lambda nodes: nodes.end(stopped=False, returncode=0), 0), (lambda nodes: nodes.end(stopped=False), 1), (lambda nodes: nodes.end(stopped=True), 1),
    (lambda nodes: [nodes.fleet.nodes[name].cut() for name in NAMES], 3),
])  # fmt: skip
def test_what_stands_still_and_belongs_to_nobody_has_ended(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, say: Callable[[Nodes], None], code: int
) -> None:
    """Its supervisor was killed, or the machine that had it is off."""
    monkeypatch.setattr(ownership, "STILL_S", 0.05)
    monkeypatch.setattr(ownership, "UNSEEN_S", 0.1)
    store.write_json(paths.supervisor_json, {"doing": "recovering", "why": "", "attempt": 1, "pid": 2**22 + 1})
    nodes.end(stopped=False)
    say(nodes)
    assert monitor.until_end(fleet, paths, console=Console(file=io.StringIO()), options=lambda verb: "") == code
    assert fleet.verbs(*ENDS) == []


def test_a_supervisor_that_leaves_while_the_nodes_are_asked_is_asked_about_once_more(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths
) -> None:
    """Their answers may be older than its last word: the next attempt may have come and gone."""
    store.write_json(paths.supervisor_json, {"doing": "ended", "why": "done", "attempt": 1, "pid": 1})
    nodes.end(stopped=True)
    answer = fleet.nodes["laptop"].answers["poll"]
    with ExitStack() as stack:
        local_lock = stack.enter_context(ExitStack())
        local_lock.enter_context(supervisor_lock.held(paths))
        fleet.answer("poll", lambda request: (local_lock.close(), answer)[1], ["laptop"])
        watcher = monitor.Watcher(fleet, paths)
        assert not watcher.look().is_over
        assert watcher.look().is_over


def test_a_process_of_this_machine_that_is_gone_owns_nothing(fleet: FakeFleet, nodes: Nodes, paths: RunPaths) -> None:
    gone = {**process_owner.mark(), "born": 1}
    nodes.owner.update(
        supervisor={**ELSEWHERE, "process": gone, "silent_s": 1.0, "has_left": False},
        claim={**ELSEWHERE, "process": gone, "doing": "x", "age_s": 1.0},
    )
    nodes.end(stopped=False)
    watcher = monitor.Watcher(fleet, paths)
    watcher.look()
    assert not watcher.owner.is_owned


@pytest.mark.parametrize("own", [*OWNERS, None])
def test_orphans_are_those_of_nobody(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, own: Own | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"name": paths.name, "created_at": 1.0, "attempt": 1, "alive": True, "exit": None, "final": False, "busy": ""}
    fleet.answer("runs", {"runs": [known], "secrets_removed": []})
    monkeypatch.setattr(run_lookup, "run", lambda *_: paths)
    with ExitStack() as stack:
        if own is not None:
            own(paths, nodes, stack)
        nodes.end(stopped=False)
        ended, kept, _, _ = stop.end_orphans(fleet, paths.root.parent, lambda text: None)
    assert (kept, len(ended)) == (([paths.name], 0) if own else ([], 1))


def test_recover_by_hand_leaves_a_run_to_its_supervisor_elsewhere(fleet: FakeFleet, paths: RunPaths) -> None:
    owner = {**NOBODY, "supervisor": {**ELSEWHERE, "silent_s": 2.0, "has_left": False}}
    fleet.answer("supervisor-look", {"supervisor": None, "owner": owner}, ["laptop"])
    with pytest.raises(InputError, match="a supervisor on another machine") as caught:
        recover_run._refuse_supervised(fleet, paths)
    assert "me on laptop" in caught.value.where and "kill 7" in caught.value.hint


@pytest.mark.parametrize(("wanted", "verbs"), [(False, ["claim", "stop"]), (True, [])])
def test_who_waits_ends_the_rest_of_a_failed_attempt_only_where_no_supervisor_was_wanted(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, wanted: bool, verbs: list[str]
) -> None:
    """A rank that had not begun to train waits for the one that is missing, and holds its card."""
    store.write_json(paths.supervisor_json, {"doing": "launching", "wanted": wanted, "pid": 1})
    over = {"agent_alive": False, "torchrun_alive": False, "exit": {"returncode": 1, "ended_at": 990.0}}
    nodes.say(tower=over, laptop={})
    assert stop.end_rest(fleet, paths) == []
    assert sorted({verb for _, verb in fleet.asked if verb in ("claim", "stop")}) == verbs
    assert not [line for line in event_log.lines(paths) if line["event"] == "stopped"], "nobody has stopped it by hand"


@pytest.mark.parametrize(("watched", "code"), [("left", 0), ("interrupted", 130)])
def test_who_leaves_with_a_key_has_interrupted_nothing(
    fleet: FakeFleet, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, watched: Any, code: int
) -> None:
    monkeypatch.setattr(live, "watch", lambda *_, **__: Watched(None, watched))
    assert monitor.until_end(fleet, paths, console=Console(file=io.StringIO()), options=lambda verb: "") == code


@pytest.mark.parametrize("own", OWNERS)
def test_who_is_interrupted_while_a_run_recovers_is_told_how_to_look_again(
    fleet: FakeFleet, nodes: Nodes, paths: RunPaths, monkeypatch: pytest.MonkeyPatch, own: Own
) -> None:
    real, looks, said = monitor.Watcher.look, 0, io.StringIO()

    def look(watcher: monitor.Watcher) -> Any:
        nonlocal looks
        looks += 1
        if looks > 1:
            raise KeyboardInterrupt
        return real(watcher)

    monkeypatch.setattr(monitor.Watcher, "look", look)
    with ExitStack() as stack:
        own(paths, nodes, stack)
        nodes.end(stopped=False)
        assert monitor.until_end(fleet, paths, console=Console(file=said, width=200), options=lambda verb: " --cluster other.toml") == 130
    assert f"continues without the dashboard.\n  to look again: homelab status --cluster other.toml --wait {paths.name}" in said.getvalue()
    assert fleet.verbs(*ENDS) == []


def test_a_newer_attempt_is_learned_from_a_node_that_has_a_part_in_it(fleet: FakeFleet, paths: RunPaths) -> None:
    """Another controller has left out the first node of the plan, which answers all the same."""
    alone = builders.plan([builders.rank_plan(0, "laptop")], attempt=2)
    fleet.answer("poll", builders.raw_reply("tower", step=9), ["tower"])
    fleet.answer("poll", builders.raw_reply("laptop", step=12, attempt=2), ["laptop"])
    fleet.answer("describe", {"run_json": None, "plans": {"1": PLAN.model_dump(mode="json")}}, ["tower"])
    fleet.answer("describe", {"run_json": None, "plans": {"2": alone.model_dump(mode="json")}}, ["laptop"])
    snapshot = monitor.Watcher(fleet, paths).look()
    assert snapshot.attempt == 2 and [node.name for node in snapshot.nodes] == ["laptop"]
