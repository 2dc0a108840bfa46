"""The law: a recipe alone decides the training; the cluster only decides who computes what.

The same recipe on one node, on two or three with unequal shares of which one is killed and brought back, and on three of which one is
killed and two go on: the same weights, the same losses, every sample once per epoch.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, relative_error, wait_until
from tests.e2e.conftest import EPOCHS, ROWS, STEPS
from tests.e2e.test_methods import ADAPTER, ALWAYS, assert_answers

TOLERANCE = 1e-5
SHARES = {"node1": 6, "node2": 4, "node3": 2}


def assert_lawful(run: Run, reference: Run, *, head: str) -> None:
    """Weights and losses within 1e-5 of the reference, and every sample once per epoch over all attempts."""
    assert relative_error(run.weights(head), reference.weights("node1")) <= TOLERANCE
    found, expected = run.losses(), reference.losses()
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    worst = max(abs(found[step] - expected[step]) / abs(expected[step]) for step in expected)
    assert worst <= TOLERANCE
    assert_every_sample_once(run)


def assert_every_sample_once(run: Run) -> None:
    epochs = run.samples()
    assert sorted(epochs) == list(range(EPOCHS))
    for epoch, ids in epochs.items():
        assert sorted(ids) == list(range(ROWS)), f"epoch {epoch}"


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(150)
def test_the_reference_learns_and_sees_every_sample_once(reference: Run) -> None:
    losses = reference.losses()
    assert losses[STEPS] < 0.95 * losses[1]
    assert any(abs(tensor).max() > 0 for name, tensor in reference.weights("node1").items() if "lora_B" in name)
    assert_every_sample_once(reference)


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(90)
def test_lora_answers(desk: Desk, reference: Run) -> None:
    """It stands here because the reference is trained once for each file."""
    final = reference.folder("node1") / "final"
    assert {file.name for file in final.iterdir()} >= ALWAYS | ADAPTER
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 4
    assert_answers(desk, reference)


@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(240)
@pytest.mark.parametrize("shares", [{"node1": 8, "node2": 4}, pytest.param(SHARES, marks=pytest.mark.thorough)], ids=len)
def test_unequal_shares_of_which_one_is_killed_and_brought_back(desk: Desk, lab: Lab, reference: Run, shares: dict[str, int]) -> None:
    told = ", ".join(f"{node} = {share}" for node, share in shares.items())
    desk.write("killed.toml", (desk.folder / "law.toml").read_text().replace("node1 = 6, node2 = 4, node3 = 2", told))
    run = Desk(desk.folder, lab, supervise=True).launch("killed.toml", "--nodes", ",".join(shares))
    paths = RunPaths(desk.folder / "runs" / run.name)
    try:
        run.wait_for_step(1, 13)
        lab.fault("node2", "kill-worker")
        wait_until(
            lambda: store.read_object(paths.supervisor_json)["doing"] in ("ended", "given up"),
            150,
            lambda: paths.supervisor_log.read_text(errors="replace"),
        )
    finally:
        desk.homelab("stop", run.name)
    ended = store.read_object(paths.supervisor_json)
    assert (ended["doing"], ended["why"]) == ("ended", "done"), ended
    assert [(restart["cause"], restart["node"]) for restart in ended["restarts"]] == [("killed", "node2")]
    assert_same_training(desk, run, reference, shares)


def assert_same_training(desk: Desk, run: Run, reference: Run, shares: dict[str, int]) -> None:
    """Done, by the shares of the recipe, lawful, and `compare` says so."""
    status = desk.json("status", run.name)
    assert status["state"] == "done"
    assert {rank["node"]: rank["share"] for rank in status["ranks"]} == shares
    assert_lawful(run, reference, head="node1")
    alone, together = desk.json("compare", reference.name, run.name)["runs"]
    assert together["is_same"] is True and together["common_steps"] == STEPS
    assert together["curve_difference"] <= TOLERANCE and not together["differs"]
    assert alone["speed_up"] == 1 and together["speed_up"] > 0 and together["side"]["nodes"] == list(shares)
    said = desk.homelab("compare", reference.name, run.name).stdout
    assert f"{run.name} is the same training as {reference.name}" in said and "Next: homelab report" in said


@pytest.mark.thorough  # the test above is the same with a worker that is killed
@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(240)
def test_three_nodes_with_unequal_shares(desk: Desk, reference: Run) -> None:
    run = desk.launch("law.toml")
    run.wait_for_end(1, nodes=3)
    assert_same_training(desk, run, reference, SHARES)


@pytest.mark.thorough  # it measures speeds: other files beside it disturb it
@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(240)
def test_measured_shares_move_rows_and_the_next_plan_knows_the_speeds(desk: Desk, lab: Lab, reference: Run) -> None:
    fixed = (desk.folder / "law.toml").read_text()
    for node in ("node1", "node2", "node3"):  # other runs of the same model have left what they measured
        shutil.rmtree(Path(lab.state.node(node).workdir) / "speeds", ignore_errors=True)
    desk.write("auto.toml", fixed.replace("shares = { node1 = 6, node2 = 4, node3 = 2 }", 'shares = "auto"'))
    run = desk.launch("auto.toml")
    try:
        run.wait_for_step(1, 6)
        lab.fault("node2", "throttle=0.1")  # far below what a busy machine leaves to the others
        run.wait_for_end(1, nodes=3, timeout_s=150)
    finally:
        lab.fault("node2", "throttle=off")
    assert_lawful(run, reference, head="node1")
    moved = [event["text"] for event in desk.json("status", run.name)["events"] if "of the tokens" in event["text"]]
    assert "the speeds are measured now" in moved[0]
    assert any("(node2) is" in text and "as slow as expected" in text for text in moved[1:]), moved

    plan = desk.json("plan", "auto.toml", "--no-dry-run")
    speeds = {rank["node"]: rank["speed"]["token_s"] for rank in plan["ranks"]}
    assert plan["balance"] == "measured"
    assert speeds["node2"] > 2 * max(speeds["node1"], speeds["node3"])
    assert plan["time"]["is_measured"] and plan["time"]["hours"] > 0


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.namespaces
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
def test_a_killed_worker_and_two_nodes_that_go_on(desk: Desk, lab: Lab, reference: Run, seed: int) -> None:
    draw = random.Random(seed)
    victim, step = draw.choice(["node1", "node2", "node3"]), draw.randint(13, 18)
    run = desk.launch("law.toml")
    run.wait_for_step(1, step)
    lab.fault(victim, "kill-worker")
    run.wait_for_end(1, nodes=3, timeout_s=30)
    reached = max(run.losses())
    failed = desk.json("status", run.name, code=1)
    assert failed["state"] == "failed"

    recovered = desk.json("recover", run.name, "--nodes", "node1,node2")
    assert recovered["attempt"] == 2
    assert recovered["nodes"] == ["node1", "node2"]
    assert recovered["left_out"] == ["node3"]
    # A crash must have cost steps: else the new attempt would have nothing to do again.
    assert 0 < recovered["resume_step"] < reached < STEPS
    run.wait_for_end(2, nodes=2)
    assert desk.json("status", run.name)["state"] == "done", run.logs(2)
    assert_lawful(run, reference, head="node1")
    assert failed["diagnosis"]["first_node"] == victim, failed["diagnosis"]
