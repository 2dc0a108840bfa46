"""A node goes to its owner, and comes back, where each node has a part of the model or of the state: the cut is another one then, the training the same."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.config import load
from homelab.controller.features.leave import ask_leave
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run
from tests.e2e.conftest import recipe
from tests.e2e.test_supervisor import events, of_run, wait_for_attempt
from tests.e2e.test_yield import NODES, PER_EPOCH, assert_lawful, looked_after, resumed_at
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600), pytest.mark.thorough]
LAYERS, STEPS = 9, 24 * PER_EPOCH
KINDS = {"pipeline": "qlora", "zero2": "lora", "zero3": "lora"}


@pytest.fixture(scope="module")
def deep(base: Path) -> Path:
    return harness.tiny_llama(base / "deep-llama", layers=LAYERS)


def written(desk: Desk, model: Path, kind: str, strategy: str = "auto") -> str:
    """The name of the recipe. Only the last step is saved where nobody asks for more."""
    text = recipe(model, kind=kind, length=f"steps = {STEPS}", learning_rate=1e-4).replace("every_steps = 10", "every_steps = 100000")
    shares = next(line for line in text.splitlines() if line.startswith("shares"))
    name = f"house-{strategy}-{kind}.toml"
    desk.write(name, text.replace(shares, f'strategy = "{strategy}"'))
    return name


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, desk: Desk, lab: Lab, deep: Path) -> Run:
    """The same training on one node, to its end."""
    run = desk.launch(written(desk, deep, request.param), "--nodes", "node1")
    run.wait_for_end(1, nodes=1, timeout_s=400)
    return run


def assert_no_layer_is_quantised_again(run: Run, plans: list[dict[str, Any]]) -> None:
    kept: dict[str, set[int]] = {node: set() for node in NODES}
    for attempt, plan in enumerate(plans, start=1):
        for rank in plan["ranks"]:
            node, own = rank["node"], set(range(rank["stage"]["begin"], rank["stage"]["end"]))
            notes = (run.folder(node) / "attempts" / str(attempt) / "ranks" / str(rank["rank"]) / "metrics.jsonl").read_text()
            for count, words in (
                (len(own & kept[node]), "layers quantised before, read"),
                (len(own - kept[node]), "layers quantised, and stored"),
            ):
                assert (f"base: {count} {words}" in notes) if count else (words not in notes), (attempt, rank, kept)
            kept[node] |= own
    assert any(kept.values())


@pytest.mark.parametrize(("undisturbed", "strategy"), [(kind, strategy) for strategy, kind in KINDS.items()], indirect=["undisturbed"])
def test_the_others_go_on_with_its_part(strategy: str, desk: Desk, lab: Lab, undisturbed: Run, deep: Path) -> None:
    run = desk.launch(written(desk, deep, KINDS[strategy], strategy))
    paths, runs_dir = of_run(desk, run), desk.folder / "runs"
    with looked_after(desk, run) as future, Fleet(load.load_cluster(desk.cluster)) as fleet:
        run.wait_for_step(1, 10)
        left = ask_leave.give_back(fleet, runs_dir, ask_leave.wish("node2", "2h", "", time.time()), lambda text: None)
        assert left.goes_on == {run.name: ("node1", "node3")}, events(paths)
        assert not lab.processes_of_run(run.name)["node2"], "the whole card is its owner's"
        second = resumed_at(desk, run, 2)
        assert (second["strategy"], second["resume_step"] >= 10) == (strategy, True), "what was done was saved"
        run.wait_for_step(2, second["resume_step"] + 1)
        ask_leave.take_back(fleet, runs_dir, "node2")
        wait_for_attempt(paths, 3)
        third = resumed_at(desk, run, 3)
        assert [node["name"] for node in third["nodes"]] == list(NODES) and third["resume_step"] > second["resume_step"]
        assert future.result(timeout=300) == "done"
        assert store.read_object(paths.supervisor_json)["restarts"] == [], events(paths)
    if strategy == "pipeline":
        assert len(second["ranks"]) == 2, "another cut"
        assert_no_layer_is_quantised_again(run, [resumed_at(desk, run, 1), second, third])
    assert_lawful(run, undisturbed, STEPS)
    assert not any(lab.processes_of_run(run.name).values()), "nobody is left"
