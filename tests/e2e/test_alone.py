"""A cable is out and nobody looks: every node lets go of its rank after a minute, says why, and the run goes on when it is told to."""

from __future__ import annotations

import json

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_law import assert_lawful

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.namespaces, pytest.mark.timeout(300)]


def test_nodes_that_lost_everybody_let_go_and_the_run_can_go_on(desk: Desk, lab: Lab, reference: Run) -> None:
    run = desk.launch("law.toml")
    # Long before the next checkpoint: who saves may wait longer than who trains.
    run.wait_for_step(1, 11)
    lab.fault("node2", "pull-cable")
    try:
        # Below the two minutes after which torch itself gives up.
        wait_until(lambda: len(run.exits(1)) == 3, 100, lambda: f"{[run.heartbeat(1, rank) for rank in range(3)]}\n{run.logs(1)}")
        assert not any(lab.processes_of_run(run.name).values())
    finally:
        lab.fault("node2", "plug-cable")
    ends = run.exits(1)
    assert "the other nodes are lost" in ends["node2"]["alone"], ends
    told = json.loads(desk.homelab("why", run.name, "--json", code=None).stdout)
    assert told["diagnosis"]["cause"] == "alone", told
    desk.homelab("recover", run.name, "--wait", timeout_s=120)
    assert_lawful(run, reference, head="node1")
