"""What is said of a run whose nodes cannot all be asked: `status`, `why`, the events and diagnosis.json agree, and a stop has no cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import preconditions
from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.features.recover import examine
from homelab.controller.features.status import failure, monitor
from homelab.controller.run import event_log, store
from homelab.controller.run.paths import RunPaths
from tests.controller.dashboard import sample
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
DEAD = {"agent_alive": False, "torchrun_alive": False}
STOPPED = {**DEAD, "exit": {"returncode": None, "signal": 15, "ended_at": sample.NOW - 5, "stopped": True}}
KILLED = {**DEAD, "exit": {"returncode": None, "signal": 9, "ended_at": sample.NOW - 5, "stopped": False}}
LET_GO = {
    **DEAD,
    "exit": {"returncode": 1, "signal": None, "ended_at": sample.NOW - 5, "stopped": False, "alone": "it had lost the others"},
}
LOST = {"metrics": [], "error": {"message": "Connection closed by peer"}}
OFF = UnreachableError("no answer within 5 s: it is off", where="node laptop", hint="wake it, then: ssh -v laptop true")


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    paths = RunPaths(tmp_path / sample.RUN)
    store.write_json(paths.plan_json(1), sample.plan().model_dump(mode="json"))
    store.write_json(paths.run_json, {"recipe_file": "r.toml", "recipe": {"parallel": {"shares": "auto"}}})
    return paths


@pytest.fixture
def fleet(tmp_path: Path) -> Callable[..., FakeFleet]:
    """A cluster of these machines; those of the run answer what is replaced of their "run", or with the error given."""

    def make(names: str = "tower laptop old", **runs: Any) -> FakeFleet:
        made = FakeFleet(tmp_path / "nodes", names.split())
        # A machine that is no node of the run knows nothing of it, and is asked all the same.
        for name in made.nodes:
            made.answer("poll", {"node": name, "time": sample.NOW, "run": None}, [name])
        for rank, name in enumerate(sample.CARDS):
            given = runs.get(name, STOPPED)
            answer = given if isinstance(given, HomelabError) else sample.raw_reply(name, rank, 3, **given)
            if name in made.nodes:
                made.answer("poll", answer, [name])
        return made.answer("supervised", {"alive": False})

    return make


def events(paths: RunPaths) -> list[str]:
    return [str(line["what"]) for line in event_log.lines(paths)]


@pytest.mark.parametrize("laptop", [OFF, LET_GO, "renamed"])
def test_beside_a_stop_by_hand_a_node_that_is_gone_is_no_cause(paths: RunPaths, fleet: Callable[..., FakeFleet], laptop: Any) -> None:
    store.set_state(paths, "stopping", 1, intent="stopping")
    nodes = fleet("tower desk old") if laptop == "renamed" else fleet(laptop=laptop)
    seen = monitor.Watcher(nodes, paths).look().with_options(lambda name: " -c x")
    assert (seen.state, seen.diagnosis) == ("stopped", None) and events(paths) == ["stopped"]
    if laptop is not LET_GO:
        (note,) = [note for note in seen.notes if "laptop" in note]
        assert note.startswith("laptop was not asked: ") and f"homelab stop -c x {sample.RUN}" in note
    assert not paths.diagnosis_json(1).exists()
    assert failure.look(nodes, paths, None, lambda text: None).stored is None
    assert examine.examine(nodes, paths, lambda text: None).diagnosis is None


def test_but_a_rank_that_had_failed_before_is_told(paths: RunPaths, fleet: Callable[..., FakeFleet]) -> None:
    store.set_state(paths, "stopping", 1, intent="stopping")
    seen = monitor.Watcher(fleet(tower=KILLED, laptop=OFF), paths).look()
    assert seen.state == "stopped" and seen.diagnosis is not None and seen.diagnosis.cause == "torchrun-killed"


def test_what_was_kept_is_told_where_it_knows_more_than_the_nodes_do_today(paths: RunPaths, fleet: Callable[..., FakeFleet]) -> None:
    failed = {**DEAD, "exit": {"returncode": 1, "signal": None, "ended_at": sample.NOW, "stopped": False}}
    lost = {**failed, "ranks": {"0": LOST}}
    first = monitor.Watcher(fleet(tower=lost, laptop=KILLED, old=failed), paths).look()
    assert first.state == "failed" and first.diagnosis is not None and first.diagnosis.cause == "torchrun-killed"
    for nodes in (fleet(tower=lost, laptop=OFF, old=failed), fleet("tower desk old", tower=lost, old=failed)):
        later = monitor.Watcher(nodes, paths).look()
        told = failure.look(nodes, paths, None, lambda text: None).stored
        assert later.diagnosis == first.diagnosis and told is not None and told.diagnosis == first.diagnosis
        assert examine.examine(nodes, paths, lambda text: None).diagnosis == first.diagnosis
    assert events(paths) == [f"failed: {first.diagnosis.title}"]


def test_the_fix_is_what_the_connection_said(paths: RunPaths, fleet: Callable[..., FakeFleet]) -> None:
    failed = {**DEAD, "exit": {"returncode": 1, "signal": None, "ended_at": sample.NOW, "stopped": False}}
    seen = monitor.Watcher(fleet(tower=failed, laptop=OFF, old=failed), paths).look()
    assert seen.diagnosis is not None and seen.diagnosis.title == "laptop cannot be reached: no answer within 5 s: it is off"
    assert seen.diagnosis.hint.startswith("wake it, then: ssh -v laptop true; homelab recover")
    assert events(paths) == [f"failed: {seen.diagnosis.title}"]


def test_the_address_that_ranks_name_is_that_of_the_plan(paths: RunPaths, fleet: Callable[..., FakeFleet]) -> None:
    said = {
        "metrics": [],
        "error": {
            "message": "Gloo connectFullMesh failed with timed out connecting: SO_ERROR: Connection timed out, remote=[192.168.1.100]:1$1"
        },
    }
    bad = {"returncode": 1, "signal": None, "ended_at": sample.NOW, "stopped": False}
    ends = {name: {**DEAD, "exit": bad, "ranks": {str(rank): said}} for rank, name in ((1, "laptop"), (2, "old"))}
    seen = monitor.Watcher(fleet(tower={"ranks": {}}, **ends), paths).look()
    assert seen.diagnosis is not None and (seen.diagnosis.cause, seen.diagnosis.first_node) == ("unconnected", "tower")


def test_fixed_shares_of_a_node_that_was_renamed_name_the_ways_out(paths: RunPaths, fleet: Callable[..., FakeFleet]) -> None:
    described = {"recipe": {"parallel": {"shares": {"tower": 18, "laptop": 9, "old": 6}}}}
    with pytest.raises(InputError) as refused:
        preconditions.refuse_unnamed_shares(paths, described, ["tower", "desk", "old"])
    said = refused.value
    assert said.message.startswith("laptop is not in cluster.toml any more") and "tower, desk, old" in said.message
    assert (
        "its old name back" in said.hint
        and "key recipe.parallel.shares" in said.hint
        and said.hint.endswith(f"homelab recover {paths.name}")
    )
    preconditions.refuse_unnamed_shares(paths, described, ["tower", "laptop", "old", "desk"])
    for damaged in ({}, {"recipe": 3}, {"recipe": {"parallel": 3}}, {"recipe": {"parallel": {"shares": "auto"}}}):
        preconditions.refuse_unnamed_shares(paths, damaged, ["desk"])
    store.write_json(paths.run_json, {"recipe_file": "r.toml", **described})
    failed = {**DEAD, "exit": {"returncode": 1, "signal": None, "ended_at": sample.NOW, "stopped": False}}
    lost = {name: {**failed, "ranks": {rank: LOST}} for name, rank in (("tower", "0"), ("old", "2"))}
    seen = monitor.Watcher(fleet("tower desk old", **lost), paths).look().with_options(lambda name: " -c x")
    assert seen.diagnosis is not None and seen.diagnosis.cause == "not-in-cluster"
    assert "its old name back" in seen.diagnosis.hint and seen.diagnosis.hint.endswith(f"homelab recover -c x {paths.name}")
