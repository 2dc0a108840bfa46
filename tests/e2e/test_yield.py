"""The house comes first: a node goes to its owner and comes back, and the training is the one that nothing happened to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.config import load
from homelab.controller.features.leave import ask_leave
from homelab.controller.features.supervise import supervision
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store, supervisor_lock
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.conftest import GLOBAL_BATCH, ROWS, recipe
from tests.e2e.test_supervisor import events, of_run, wait_for_attempt

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600), pytest.mark.thorough]
STEPS, PER_EPOCH = 540, -(-ROWS // GLOBAL_BATCH)
TOLERANCE = 1e-5
NODES = ("node1", "node2", "node3")


@pytest.fixture(scope="module")
def undisturbed(desk: Desk, lab: Lab, model: Path) -> Run:
    """The same recipe on one node, to its end. Only the last step is saved where nobody asks for more."""
    desk.write(
        "house.toml", recipe(model, length=f"steps = {STEPS}", learning_rate=1e-4).replace("every_steps = 10", "every_steps = 100000")
    )
    run = desk.launch("house.toml", "--nodes", "node1")
    run.wait_for_end(1, nodes=1, timeout_s=300)
    return run


def resumed_at(desk: Desk, run: Run, attempt: int) -> dict[str, Any]:
    return store.read_object(desk.folder / "runs" / run.name / "attempts" / str(attempt) / "plan.json")


def assert_lawful(run: Run, reference: Run, steps: int = STEPS) -> None:
    """Every sample once per epoch, over all attempts, and the same curve."""
    found, expected = run.losses(), reference.losses()
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1))
    errors = {step: abs(found[step] - expected[step]) / abs(expected[step]) for step in expected}
    assert max(errors.values()) <= TOLERANCE, [(step, error) for step, error in errors.items() if error > TOLERANCE / 10][:20]
    epochs = run.samples()
    assert sorted(epochs) == list(range(steps // PER_EPOCH))
    assert all(sorted(ids) == list(range(ROWS)) for ids in epochs.values())


@contextmanager
def looked_after(desk: Desk, run: Run, *nodes: str) -> Iterator[Future[str | None]]:
    """A supervisor of the run in this process: it is there at once, however busy the machine is."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(supervision.supervise, load.load_cluster(desk.cluster).only(nodes or NODES), of_run(desk, run), lambda text: None)
    wait_until(lambda: supervisor_lock.is_held(of_run(desk, run)), 30)
    try:
        yield future
    finally:
        desk.homelab("stop", run.name, code=None)
        pool.shutdown()


def test_a_node_goes_to_its_owner_and_comes_back(desk: Desk, lab: Lab, undisturbed: Run) -> None:
    run = desk.launch("house.toml")
    paths, runs_dir = of_run(desk, run), desk.folder / "runs"
    with looked_after(desk, run) as future, Fleet(load.load_cluster(desk.cluster)) as fleet:
        run.wait_for_step(1, 20)
        left = ask_leave.give_back(fleet, runs_dir, ask_leave.wish("node3", "2h", "", time.time()), lambda text: None)
        assert left.goes_on == {run.name: ("node1", "node2")}, events(paths)
        assert not lab.processes_of_run(run.name)["node3"], "the whole card is its owner's"
        second = resumed_at(desk, run, 2)
        assert second["resume_step"] >= 20, "what was done was saved"
        assert "node3 was given back to its owner until" in second["left_out_because"]["node3"]
        run.wait_for_step(2, second["resume_step"] + 1)
        ask_leave.take_back(fleet, runs_dir, "node3")
        wait_for_attempt(paths, 3)
        third = resumed_at(desk, run, 3)
        assert [node["name"] for node in third["nodes"]] == ["node1", "node2", "node3"] and third["resume_step"] > second["resume_step"]
        assert future.result(timeout=200) == "done"
        assert store.read_object(paths.supervisor_json)["restarts"] == [], events(paths)
    status = desk.json("status", run.name)
    assert (status["state"], status["restarts"], status["given_back"]) == ("done", 0, [])
    assert_lawful(run, undisturbed)
    page = desk.folder / "house.html"
    desk.homelab("report", run.name, "--output", str(page))
    assert "node3 was given back once, 0 h 0" in page.read_text()
    assert not any(lab.processes_of_run(run.name).values()), "nobody is left"


def test_the_only_node_is_waited_for(desk: Desk, lab: Lab, undisturbed: Run) -> None:
    run = desk.launch("house.toml", "--nodes", "node2")
    paths, runs_dir = of_run(desk, run), desk.folder / "runs"
    with looked_after(desk, run, "node2") as future, Fleet(load.load_cluster(desk.cluster)) as fleet:
        run.wait_for_step(1, 20)
        left = ask_leave.give_back(fleet, runs_dir, ask_leave.wish("node2", "", "", time.time()), lambda text: None)
        assert left.goes_on == {run.name: ()} and not lab.processes_of_run(run.name)["node2"], events(paths)
        status = desk.homelab("status", run.name, "--once").stdout
        assert "waits: step " in status and "node2 was given back to its owner" in status, status
        ask_leave.take_back(fleet, runs_dir, "node2")
        assert future.result(timeout=200) == "done"
        assert store.read_object(paths.supervisor_json)["restarts"] == [], events(paths)
    assert resumed_at(desk, run, 2)["resume_step"] >= 20
    assert_lawful(run, undisturbed)
