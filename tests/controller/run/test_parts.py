"""A run is its own, whatever its nodes are called now: which machine of today is which node, and what nobody has looked at."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.stop.stop import StopOutcome
from homelab.controller.run import node_matching, run_lookup
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.run_messages import Reply, RunReply, Stopped

HOSTS = {"node1": "10.0.0.11", "node2": "10.0.0.12", "node3": "10.0.0.13"}
OFF = UnreachableError("no route to host")


def answer(*as_nodes: str, asked: int = 0) -> dict[str, Any]:
    return dict(as_json(Stopped(asked=asked, killed=0, left=(), as_nodes=as_nodes)))


@pytest.mark.parametrize(
    ("stopped", "errors", "hosts", "unseen"),
    [
        ({name: answer(name) for name in HOSTS}, {}, HOSTS, {}),
        # It was shipping: no node knows the run yet, and every machine is the one that it was.
        ({name: answer() for name in HOSTS}, {}, HOSTS, {}),
        # Swapped addresses, and a node that was renamed: the machines are asked under other names.
        ({"node1": answer("node1"), "node2": answer("node3"), "node3": answer("node2")}, {}, HOSTS, {}),
        ({"node1": answer("node1"), "tower": answer("node2"), "node3": answer("node3")}, {}, {}, {}),
        # Renamed, and off, or gone for good.
        ({"node1": answer("node1"), "node3": answer("node3")}, {"tower": OFF}, {}, {"node2": "not in cluster.toml any more"}),
        ({"node1": answer("node1"), "node3": answer("node3")}, {"node2": OFF}, HOSTS, {"node2": "no route"}),
        # Another machine has the name, and the one of the run is nowhere.
        ({"node1": answer("node1"), "node2": answer("node3"), "node3": answer()}, {}, HOSTS, {"node2": "was node3 in this run"}),
        ({"node1": answer("node1"), "node2": answer(), "node3": answer("node3")}, {}, HOSTS | {"node2": "10.0.0.99"}, {"node2": "address was 10.0.0.12"}),
        # It is off by its new name, and was seen by another one.
        ({"node1": answer("node1"), "node3": answer("node2", "node3")}, {"node2": OFF}, HOSTS, {}),
    ],
)  # fmt: skip
def test_verified_is_said_only_of_what_was_looked_at(
    stopped: dict[str, dict[str, Any]], errors: dict[str, HomelabError], hosts: dict[str, str], unseen: dict[str, str]
) -> None:
    found = node_matching.unseen(HOSTS, stopped, errors, hosts)
    assert found.keys() == unseen.keys()
    assert all(words in found[name].message for name, words in unseen.items())
    assert StopOutcome("r", stopped, found).exit_code == (3 if unseen else 0)


def test_a_person_is_told_who_it_was() -> None:
    lines = StopOutcome("r", {"tower": answer("node2", asked=3), "node1": answer("node1")}, {}).lines()
    assert lines == ["tower (node2 in this run): 3 processes ended; verified, nothing is left", "node1: nothing was running; verified"]


def said(name: str, as_node: str | None) -> dict[str, Any]:
    """As the node program says it: a field that it has no more cannot be made here."""
    run = None if as_node is None else RunReply(name="r", as_node=as_node)
    return dict(as_json(Reply(node=name, time=1.0, run=run)))


def test_answers_stand_under_the_names_of_the_run() -> None:
    answers = {
        "node1": said("node1", "node1"),
        "node2": said("node2", "node3"),
        "tower": said("tower", "node2"),
        "node4": said("node4", None),
    }
    found, silent = node_matching.sorted_out(answers, {}, ["node1", "node2", "node3"])
    assert {name: entry["node"] for name, entry in found.items()} == {"node1": "node1", "node3": "node2", "node2": "tower"} and silent == {}
    found, silent = node_matching.sorted_out({"node2": said("node2", "node3")}, {"node1": OFF}, ["node1", "node2", "node4"])
    assert found == {}
    assert silent == {
        "node1": "no route to host",
        "node2": "another machine has its name now (here it was node3)",
        "node4": node_matching.GONE,
    }
    # The agent of an older controller does not say who it is.
    assert node_matching.sorted_out({"node1": {"node": "node1", "run": {}}}, {}, ["node1"])[0].keys() == {"node1"}


@pytest.mark.parametrize(
    ("created", "alive", "undecided", "run"),
    [
        ({"old": 1.0, "new": 2.0}, (), (), "new"),
        ({"lives": 1.0, "done": 2.0}, ("lives",), (), "lives"),
        ({"lives": 1.0, "too": 2.0, "done": 3.0}, ("lives", "too"), (), "too"),
        ({"ships": 1.0, "done": 2.0}, (), ("ships",), "ships"),  # the controller's clock went back, or its nodes cannot be asked
        ({"ships": 3.0, "lives": 1.0}, ("lives",), ("ships",), "lives"),
        ({}, (), (), None),
    ],
)  # fmt: skip
def test_without_a_name_the_run_that_lives_is_meant(
    created: dict[str, float], alive: tuple[str, ...], undecided: tuple[str, ...], run: str | None
) -> None:
    told: list[str] = []
    assert run_lookup.meant(created, alive, undecided, told.append) == run
    assert told == (["2 runs are running; homelab takes the newest: too (not lives: name it to choose it)"] if len(alive) > 1 else [])
