"""A program takes the card of a node in the middle of a training: the node is left with a save, comes back when it is quiet, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from homelab.controller.config import load
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.supervise import house_judge, supervision
from homelab.controller.run import store, supervisor_lock
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from scripts.practice.misconfigurations.node_changes import running
from tests.e2e.test_supervisor import events, of_run, wait_for_attempt
from tests.e2e.test_yield import NODES, assert_lawful, resumed_at, undisturbed

__all__ = ["undisturbed"]
pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600), pytest.mark.thorough]
# It knows no card of its own, as far as preflight asks it, so that the ranks train on the processor.
SMI = """#!/bin/sh
case "$1" in
--query-compute-apps=*) cat {0}/compute ;;
--query-gpu=index,uuid,memory.used) echo "0, GPU-aaaa, 4000" ;;
pmon) echo "# gpu pid type sm mem fb command" ;;
*) echo "No devices were found"; exit 6 ;;
esac
"""


@pytest.fixture
def card(lab: Lab) -> Iterator[Path]:
    """What `nvidia-smi` of node3 says of the processes that compute; its owner's card, whatever else runs there."""
    folder = lab.state.node_folder(lab.state.node("node3")) / "bin"
    table = folder / "compute"
    table.write_text("")
    program = folder / "nvidia-smi"
    program.write_text(SMI.format(folder))
    program.chmod(0o755)
    yield table
    program.unlink()
    table.unlink()


def house_of(desk: Desk) -> Cluster:
    """node3 belongs to somebody who may want its card."""
    cluster = load.load_cluster(desk.cluster).only(NODES)
    nodes = tuple(node.model_copy(update={"yield_when": "gpu"}) if node.name == "node3" else node for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def test_a_program_takes_the_card(desk: Desk, lab: Lab, undisturbed: Run, card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house_judge, "QUIET_S", 4.0)
    run = desk.launch("house.toml")
    paths = of_run(desk, run)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(supervision.supervise, house_of(desk), paths, lambda text: None)
        try:
            wait_until(lambda: supervisor_lock.is_held(paths), 30)
            run.wait_for_step(1, 20)
            with running(lab, "node3", "sleep", "599") as pid:
                done = run.heartbeat(1)["step"]
                card.write_text(f"GPU-aaaa, {pid}, 3000\n")
                wait_until(lambda: (paths.plan_json(2)).exists(), 90, lambda: str(events(paths)))
                assert not lab.processes_of_run(run.name)["node3"], "the whole card is its owner's"
                second = resumed_at(desk, run, 2)
                assert [node["name"] for node in second["nodes"]] == ["node1", "node2"] and second["resume_step"] >= done, (
                    "no step is lost that was done when the card was taken"
                )
                assert second["left_out_because"]["node3"] == "node3 was given back to its owner: sleep uses its card"
                run.wait_for_step(2, second["resume_step"] + 1)
                status = desk.json("status", run.name)
                assert [row["because"] for row in status["given_back"]] == ["sleep uses its card"] and status["restarts"] == 0
            card.write_text("")
            wait_for_attempt(paths, 3)
            third = resumed_at(desk, run, 3)
            assert [node["name"] for node in third["nodes"]] == ["node1", "node2", "node3"] and third["resume_step"] > second["resume_step"]
            assert future.result(timeout=200) == "done"
        finally:
            desk.homelab("stop", run.name, code=None)
    assert store.read_object(paths.supervisor_json)["restarts"] == [], events(paths)
    status = desk.json("status", run.name)
    assert (status["state"], status["restarts"], status["given_back"]) == ("done", 0, [])
    assert_lawful(run, undisturbed)
    page = desk.folder / "house-card.html"
    desk.homelab("report", run.name, "--output", str(page))
    assert "node3 was given back once, 0 h 0" in page.read_text()
    assert not any(lab.processes_of_run(run.name).values()), "nobody is left"
