"""A node that was left out: it counts as well again only when it answers, is well, and reaches the others both ways."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from homelab.controller.config.load import load_cluster
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.features.supervise.recovery_try import Supervised
from homelab.controller.features.supervise.rejoin import RejoinMonitor
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import wait_until

pytestmark = [pytest.mark.timeout(120), pytest.mark.namespaces]

SCRIPT = parse_recipe({"script": {"path": "train.py"}})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab.up(tmp_path_factory.mktemp("returning") / "lab", nodes=2, backend="namespaces") as started:
        yield started


@pytest.fixture
def returning(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> RejoinMonitor:
    """node2 was left out, node1 trains."""
    monkeypatch.setattr("homelab.controller.features.supervise.rejoin._EVERY_S", 0.2)
    run = Supervised(load_cluster(lab.cluster_file), RunPaths(lab.cluster_file.parent / "run"), SCRIPT, [], ["power"])
    return RejoinMonitor(run, ["node2"], ["node1"])


def test_a_node_without_power_is_not_well_and_is_when_it_is_back(lab: Lab, returning: RejoinMonitor) -> None:
    lab.fault("node2", "power-cut")
    assert not _asked(returning)
    lab.fault("node2", "power-on")
    with returning:
        wait_until(lambda: returning.well == {"node2"}, 60)


@pytest.mark.skipif(shutil.which("nft") is None, reason="not installed: nft")
def test_a_node_that_the_others_cannot_reach_is_not_well_though_it_answers(lab: Lab, returning: RejoinMonitor) -> None:
    inside = ["ip", "netns", "exec", str(lab.state.node("node2").network_namespace), "nft"]
    node1 = lab.state.node("node1").host
    rules = f"add table inet t; add chain inet t i {{ type filter hook input priority 0; }}; add rule inet t i ip saddr {node1} tcp dport > 1024 drop"
    subprocess.run([*inside, rules], check=True)
    try:
        assert not _asked(returning)
    finally:
        subprocess.run([*inside, "delete", "table", "inet", "t"], check=True)
    assert _asked(returning)


def _asked(returning: RejoinMonitor) -> bool:
    """What one round of questions makes of it."""
    from homelab.controller.base.errors import HomelabError

    try:
        return returning._is_well(("node2",)) and returning._is_well(("node1", "node2"))
    except HomelabError:
        return False
