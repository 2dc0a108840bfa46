"""`homelab yield`, typed where nodes answer: what is refused and what waits until the node is back, and the fixes that are named, typed."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from scripts.practice.desk import Desk, wait_until
from tests.cli.conftest import complaint

# The house on nodes (test_house_on_nodes) says in a usual run whether a node goes and comes back.
pytestmark = [pytest.mark.timeout(300), pytest.mark.thorough]
SKIPPED = ("--skip", "collective", "--skip", "model")


def typed(refused: dict[str, Any]) -> list[str]:
    """The first command of a fix, as a person types it."""
    return shlex.split(refused["hint"].split("; ")[0].partition(": ")[2].removeprefix("homelab "))


def test_a_node_that_is_with_its_owner_is_not_taken(desk: Desk) -> None:
    assert desk.homelab("yield", "node2").stdout.splitlines()[0] == "node2 is free; no run uses it"
    refused = complaint(desk, "launch", "script.toml", *SKIPPED, code=1)
    assert refused["message"] == "node2 was given back to its owner" and refused["where"] == "node node2"
    assert refused["hint"].endswith("; or take it back: homelab yield node2 --back")
    run = desk.json(*typed(refused), *SKIPPED)["run"]
    wait_until(lambda: desk.json("status", run)["state"] == "running", 60.0)
    desk.homelab("stop", run)

    refused = complaint(desk, "recover", run, "--nodes", "node1,node2", code=1)
    assert refused["message"] == "node2 was given back to its owner" and f"homelab recover {run} --nodes node1" in refused["hint"]

    desk.homelab("queue", "add", "script.toml", *SKIPPED, "--nodes", "node2")
    queueing = desk.spawn("queue", "run")
    try:
        wait_until(lambda: desk.json("queue")["jobs"][0]["because"] == "node2 was given back to its owner", 60.0)
        assert desk.json("queue")["jobs"][0]["state"] == "waiting"
        desk.homelab("yield", "node2", "--back")
        wait_until(lambda: desk.json("queue")["jobs"][0]["state"] == "running", 100.0)
        run = desk.json("queue")["jobs"][0]["run"]
        wait_until(lambda: desk.json("status", run, code=None).get("state") == "running", 60.0)
        desk.homelab("stop", run)
        queueing.communicate(timeout=60)
    finally:
        queueing.kill()


@pytest.mark.thorough  # the refusals are in test_ask_leave.py; here the fixes are typed, one after the other
def test_a_run_without_a_supervisor_is_not_left_and_the_fixes_do_it(desk: Desk) -> None:
    run = desk.json("launch", "script.toml", *SKIPPED)["run"]  # of this desk: nobody looks after it
    wait_until(lambda: desk.json("status", run)["state"] == "running", 60.0)
    refused = complaint(desk, "yield", "node2", code=1)
    assert refused["message"].startswith(f"{run} has no supervisor here that could leave node2")
    assert f"homelab stop {run}" in refused["hint"] and f"homelab recover {run} --nodes node1" in refused["hint"]
    desk.homelab("stop", run)
    unsaved = complaint(desk, "recover", run, "--nodes", "node1", *SKIPPED, code=1)  # a program that has saved nothing
    refused = complaint(desk, *typed(unsaved), *SKIPPED, code=1)
    assert refused["message"] == "node2 was given back to its owner"
    desk.homelab(*typed(refused), *SKIPPED)
    wait_until(lambda: desk.json("status", run)["state"] == "running", 60.0)
    assert [node["name"] for node in desk.json("status", run)["nodes"]] == ["node1"]
    assert desk.homelab("yield", "node2").stdout.splitlines()[0] == "node2 is free; no run uses it"
    desk.homelab("stop", run)
    desk.homelab("yield", "node2", "--back")
