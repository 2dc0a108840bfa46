"""A run is its own, whatever its nodes are called now: addresses that were swapped, and a node that was renamed, while it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, copy_of_cluster
from tests.e2e import conftest

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.thorough, pytest.mark.timeout(240)]


@pytest.fixture
def named(base: Path, lab: Lab) -> Iterator[Desk]:
    """A desk whose nodes all keep their runs in the same place of their own homes, as people's nodes do."""
    folder = base / "desk of names"
    cluster = copy_of_cluster(lab, folder)
    cluster.write_text(re.sub(r'workdir = ".*"', 'workdir = "~/named"', cluster.read_text()))
    desk = Desk(folder, lab, cluster)
    desk.write("sleeper.py", conftest.SLEEPER)
    desk.write("sleeper.toml", '[script]\npath = "sleeper.py"\n')
    yield desk


def rename(desk: Desk, names: dict[str, str]) -> None:
    """Two names that are swapped are two machines whose addresses were."""
    text = re.sub(r'^name = "(\w+)"', lambda found: f'name = "{names.get(found[1], found[1])}"', desk.cluster.read_text(), flags=re.M)
    desk.cluster.write_text(text)


@pytest.mark.parametrize("names", [{"node2": "node3", "node3": "node2"}, {"node2": "tower"}], ids=["swapped", "renamed"])
def test_it_is_found_and_ended(named: Desk, lab: Lab, names: dict[str, str]) -> None:
    run: Run = named.launch("sleeper.toml")
    assert all(lab.processes_of_run(run.name).values())
    rename(named, names)
    today = sorted(names.get(name, name) for name in ("node1", "node2", "node3"))

    status = named.json("status", run.name)
    assert status["state"] in ("running", "starting") and [node["reachable"] for node in status["nodes"]] == [True] * 3, status
    orphans = named.json("stop", "--orphans")
    assert (orphans["ended"], orphans["kept"]) == ([], [run.name])
    assert all(name in named.homelab("preflight", "--only", "runs", code=None).stdout for name in (run.name, *today))
    assert run.name in named.homelab("logs", run.name).stdout

    done = named.homelab("stop", run.name)
    assert not any(lab.processes_of_run(run.name).values()), done.stdout
    for then, now in names.items():
        assert f"{now} ({then} in this run): " in done.stdout
    assert done.stdout.count("verified, nothing is left") == 3
    assert named.json("status", run.name)["state"] == "stopped"


def test_verified_is_not_said_of_a_machine_that_nobody_has_looked_at(named: Desk, lab: Lab) -> None:
    """The cluster file has lost a node of the run, and another one has its name."""
    run: Run = named.launch("sleeper.toml")
    whole = named.cluster.read_text()
    parts = whole.split("[[nodes]]")
    kept = [part for part in parts if 'name = "node2"' not in part]
    named.cluster.write_text("[[nodes]]".join(kept).replace('name = "node3"', 'name = "node2"'))
    stopped = named.json("stop", run.name, code=3)
    assert not stopped["clean"] and list(stopped["unreachable"]) == ["node2"], stopped
    assert "was node3 in this run" in stopped["unreachable"]["node2"]["message"]
    left = lab.processes_of_run(run.name)
    assert left["node2"] and not left["node1"] and not left["node3"]
    named.cluster.write_text(whole)
    assert named.json("stop", run.name)["clean"] and not any(lab.processes_of_run(run.name).values())
