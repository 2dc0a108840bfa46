"""A node goes to its owner where the supervisor is on the head node, and where a program of one's own trains."""

from __future__ import annotations

import time

import pytest

from homelab.controller.config import load
from homelab.controller.features.leave import ask_leave
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_head_supervisor import HEAD, key_of_the_head, log, no_supervisor_left, said
from tests.e2e.test_script import RESUMER
from tests.e2e.test_supervisor import events, of_run, wait_for_attempt
from tests.e2e.test_yield import NODES, assert_lawful, looked_after, resumed_at, undisturbed

__all__ = ["key_of_the_head", "no_supervisor_left", "undisturbed"]
pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600), pytest.mark.thorough]


def test_a_supervisor_on_the_head_hears_of_it(desk: Desk, lab: Lab, undisturbed: Run, key_of_the_head: None) -> None:
    run = desk.launch("house.toml", "--supervise", "head")
    run.wait_for_step(1, 20)
    left = desk.json("yield", "node3", "--for", "2h")
    assert left["supervised_on"] == {run.name: HEAD}, left
    wait_until(lambda: said(lab, run).get("attempt") == 2, 60, lambda: log(lab, run))
    assert not lab.processes_of_run(run.name)["node3"], "the whole card is its owner's"
    assert desk.json("status", run.name)["restarts"] == 0, "a leave is no fault"
    run.wait_for_step(2, 25)
    desk.json("yield", "node3", "--back")
    wait_until(lambda: said(lab, run).get("attempt") == 3, 60, lambda: log(lab, run))
    wait_until(lambda: said(lab, run).get("doing") in ("ended", "given up"), 200, lambda: log(lab, run))
    assert (said(lab, run)["why"], said(lab, run)["restarts"]) == ("done", []), log(lab, run)
    desk.json("status", run.name)  # from here on the controller knows of it, too
    plans = [resumed_at(desk, run, attempt) for attempt in (1, 2, 3)]
    assert [[node["name"] for node in plan["nodes"]] for plan in plans] == [list(NODES), ["node1", "node2"], list(NODES)]
    assert_lawful(run, undisturbed)


def test_a_program_of_ones_own_goes_on_from_what_it_saved(desk: Desk, lab: Lab) -> None:
    desk.write("owner.py", RESUMER.replace("61)", "401)"))
    desk.write("owner.toml", '[script]\npath = "owner.py"\n')
    run = desk.launch("owner.toml")
    paths, runs_dir = of_run(desk, run), desk.folder / "runs"
    with looked_after(desk, run) as future, Fleet(load.load_cluster(desk.cluster)) as fleet:
        run.wait_for_output(1, "node1", "saved 20")
        left = ask_leave.give_back(fleet, runs_dir, ask_leave.wish("node3", "2h", "", time.time()), lambda text: None)
        assert left.goes_on == {run.name: ("node1", "node2")}, events(paths)
        assert not lab.processes_of_run(run.name)["node3"], "the whole card is its owner's"
        second = resumed_at(desk, run, 2)
        assert second["resume_step"] >= 20
        run.wait_for_output(2, "node2", f"begins at {second['resume_step']} with")
        run.wait_for_output(2, "node1", f"saved {second['resume_step'] + 10}")
        ask_leave.take_back(fleet, runs_dir, "node3")
        wait_for_attempt(paths, 3)
        assert [node["name"] for node in resumed_at(desk, run, 3)["nodes"]] == list(NODES)
        assert future.result(timeout=200) == "done"
        assert store.read_object(paths.supervisor_json)["restarts"] == [], events(paths)
    assert run.logs(3).count(f"the sum is {sum(range(401))}") == 3, run.logs(3)
