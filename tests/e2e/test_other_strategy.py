"""A run that began with one strategy goes on with others, by one command each, and ends as on one node that nothing happened to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, relative_error, wait_until
from tests.e2e.test_law import TOLERANCE
from tests.e2e.test_supervisor import supervisor
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]

ROWS, BATCH, STEPS, EVERY = 60, 12, 40, 3
FILES = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}
RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "{kind}"
{method}
[train]
global_batch = {batch}
steps = {steps}
learning_rate = {learning_rate}
warmup_steps = 2
seq_len = 128
weight_decay = 0.01
max_grad_norm = 0.5
precision = "fp32"
gradient_checkpointing = false
[parallel]
strategy = "ddp"
[checkpoint]
every_steps = {every}
[tracking]
tensorboard = false
"""


@pytest.fixture(scope="module")
def alone(base: Path, lab: Lab) -> Iterator[Desk]:
    """A desk of its own with a recipe for each kind of training; no supervisor of its runs is left behind."""
    model = harness.tiny_llama(base / "six layers", layers=6)
    folder = base / "other strategies"
    folder.mkdir()
    desk = Desk(folder, lab)
    harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(ROWS))
    for kind, method, rate in (("lora", "rank = 4\nalpha = 8", 1e-2), ("full", "", 1e-3)):
        text = RECIPE.format(model=model, kind=kind, method=method, learning_rate=rate, batch=BATCH, steps=STEPS, every=EVERY)
        desk.write(f"{kind}.toml", text)
    yield desk
    for run in (folder / "runs").iterdir():
        supervisor(RunPaths(run), kill=True)


@pytest.fixture(scope="module")
def undisturbed(alone: Desk) -> dict[str, Run]:
    """Of each kind, the recipe on one node."""
    runs = {}
    for kind in FILES:  # in turn: both take the recipe's port
        runs[kind] = alone.launch(f"{kind}.toml", "--nodes", "node1")
        runs[kind].wait_for_end(1, nodes=1)
        assert alone.json("status", runs[kind].name)["state"] == "done", runs[kind].logs(1)
    return runs


def killed(lab: Lab, run: Run, attempt: int, step: int, node: str) -> None:
    """The worker of this node dies when this step is done, and everybody else ends with it."""
    run.wait_for_step(attempt, step)
    lab.fault(node, "kill-worker")
    run.wait_for_end(attempt, nodes=3, timeout_s=60)


def strategy_of(desk: Desk, run: Run, attempt: int) -> str:
    return str(store.read_object(RunPaths(desk.folder / "runs" / run.name).plan_json(attempt))["strategy"])


def assert_same_training(run: Run, reference: Run, kind: str, head: str = "node1") -> None:
    assert run.losses() == pytest.approx(reference.losses(), rel=TOLERANCE) and sorted(run.losses()) == list(range(1, STEPS + 1))
    assert relative_error(run.weights(head, FILES[kind]), reference.weights("node1", FILES[kind])) <= TOLERANCE
    assert run.samples() == {} or sorted(run.samples()) == list(range(STEPS * BATCH // ROWS))
    for epoch, ids in run.samples().items():
        assert sorted(ids) == list(range(ROWS)), f"epoch {epoch}"


@pytest.mark.parametrize(
    ("kind", "way"), [("lora", ["zero2", "pipeline", "ddp", "zero3", "pipeline", "zero2"]), ("full", ["pipeline", "zero3", "ddp"])]
)
def test_through_the_strategies_in_turn(alone: Desk, lab: Lab, undisturbed: dict[str, Run], kind: str, way: list[str]) -> None:
    """The checkpoints of some are one copy on each node, of others a shard on each: every step from the one to the other."""
    run = alone.launch(f"{kind}.toml")
    for attempt, strategy in enumerate(way, 1):
        killed(lab, run, attempt, 5 * attempt, f"node{attempt % 3 + 1}")
        before = strategy_of(alone, run, attempt)
        recovered = alone.json("recover", run.name, "--strategy", strategy)
        assert (
            recovered["strategy"] == strategy == strategy_of(alone, run, attempt + 1)
            and recovered["resume_step"] >= 5 * attempt - 2 * EVERY
        )
        said = f"strategy {before} -> {strategy}, by hand"
        assert said in [event["text"] for event in alone.json("status", run.name, code=None)["events"]]
    run.wait_for_end(len(way) + 1, nodes=3)
    assert alone.json("status", run.name)["state"] == "done", run.logs(len(way) + 1)
    assert_same_training(run, undisturbed[kind], kind)


@pytest.mark.parametrize("strategy", ["zero2", "pipeline"])
def test_the_supervisor_keeps_what_was_named(alone: Desk, lab: Lab, undisturbed: dict[str, Run], strategy: str) -> None:
    """And a second controller too, which has only what the nodes say."""
    run = alone.launch("lora.toml")
    killed(lab, run, 1, 7, "node2")
    supervised = Desk(alone.folder, lab, supervise=True)
    assert supervised.json("recover", run.name, "--strategy", strategy)["strategy"] == strategy
    run.wait_for_step(2, 17)
    lab.fault("node3", "kill-worker")
    wait_until(lambda: run.attempts() == [1, 2, 3], 90, lambda: run.logs(2))
    run.wait_for_end(3, nodes=3)
    wait_until(lambda: alone.json("status", run.name, code=None)["state"] == "done", 30)
    assert [strategy_of(alone, run, attempt) for attempt in (1, 2, 3)] == ["ddp", strategy, strategy]
    assert_same_training(run, undisturbed["lora"], "lora")


def test_two_nodes_are_left_for_it_and_another_controller_asks(alone: Desk, elsewhere: Desk, lab: Lab, undisturbed: dict[str, Run]) -> None:
    run = alone.launch("lora.toml")
    killed(lab, run, 1, 7, "node3")
    said = elsewhere.homelab("recover", run.name, "--nodes", "node1,node2", "--strategy", "pipeline", "--yes").stdout
    assert "strategy ddp -> pipeline, by hand" in said
    run.wait_for_step(2, 15)
    lab.fault("node1", "kill-worker")
    run.wait_for_end(2, nodes=2, timeout_s=60)
    assert alone.json("recover", run.name, "--nodes", "node1,node2")["strategy"] == "pipeline", (
        "the first controller reads it from the nodes"
    )
    run.wait_for_end(3, nodes=2)
    assert alone.json("status", run.name)["state"] == "done", run.logs(3)
    assert_same_training(run, undisturbed["lora"], "lora")
