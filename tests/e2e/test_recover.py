"""Recovery by hand, as a person meets it: refused while running, from scratch without a checkpoint, on without a dead node."""

from __future__ import annotations

import os
import signal

import pytest

from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_law import assert_lawful

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(300)]


def kill_torchrun(lab: Lab, node: str) -> None:
    """kill -9 of torchrun itself; its worker is left an orphan."""
    found = [pid for pid in lab.processes_of(node) if "torch.distributed.run" in procfs.command_line(pid)]
    assert len(found) == 1, found
    os.kill(found[0], signal.SIGKILL)


@pytest.mark.thorough
def test_from_scratch_where_nothing_was_saved(desk: Desk, lab: Lab) -> None:
    run = desk.launch("law.toml")
    # Past the rendezvous, but long before the first checkpoint.
    wait_until(lambda: run.heartbeat(1, rank=1).get("phase") == "loading", 60, lambda: run.logs(1))
    kill_torchrun(lab, "node2")
    wait_until(lambda: "node2" in run.exits(1), 20)
    assert run.exits(1)["node2"]["signal"] == signal.SIGKILL
    failed = desk.json("status", run.name, code=1)
    assert failed["state"] == "failed"
    assert failed["diagnosis"]["first_node"] == "node2", failed["diagnosis"]

    refused = desk.homelab("recover", run.name, code=1)
    assert "no complete checkpoint" in refused.stderr
    assert f"homelab recover {run.name} --from-scratch" in refused.stderr
    again = desk.json("recover", run.name, "--from-scratch")
    assert (again["attempt"], again["resume_step"], again["nodes"]) == (2, 0, ["node1", "node2", "node3"])

    running = desk.json("recover", run.name, code=2)
    assert "nothing to recover" in running["error"]["message"]
    assert run.attempts() == [1, 2]
    run.wait_for_step(2, 1)  # it trains
    assert desk.json("stop", run.name)["clean"]


@pytest.mark.thorough
def test_on_without_a_node_from_another_controller(desk: Desk, elsewhere: Desk, lab: Lab, reference: Run) -> None:
    run = desk.launch("law.toml")
    reached = run.wait_for_step(1, 13)
    lab.fault("node3", "power-cut")
    # The others do not know yet that nobody will answer; the person does not wait for their time-out.
    said = elsewhere.homelab("recover", run.name, timeout_s=90)
    assert "node3 is left out" in said.stdout
    assert 0 < int(said.stdout.split("after step ")[1].split()[0]) <= max(reached, max(run.losses()))
    run.wait_for_end(2, nodes=2)
    done = desk.json("status", run.name)
    assert done["state"] == "done", run.logs(2)
    assert [node["name"] for node in done["nodes"]] == ["node1", "node2"]
    assert_lawful(run, reference, head="node1")
    nothing = desk.json("recover", run.name, code=2)
    assert "done" in nothing["error"]["message"]
