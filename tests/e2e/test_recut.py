"""A pipeline that was cut by its owner's word moves its layers after a checkpoint, by itself, and trains on as one process would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, wait_until
from tests.e2e.test_law import TOLERANCE
from tests.e2e.test_supervisor import supervisor
from tests.lab.conftest import namespaces_missing
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]

STEPS, EVERY, BATCH, LAYERS = 60, 10, 8, 12
RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
rank = 4
alpha = 8
[train]
global_batch = {batch}
steps = {steps}
learning_rate = 1e-3
seq_len = 128
precision = "fp32"
gradient_checkpointing = false
[parallel]
strategy = "pipeline"
[checkpoint]
every_steps = {every}
[tracking]
tensorboard = false
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    base = tmp_path_factory.mktemp("recut")
    harness.tiny_llama(base / "model", hidden=512, intermediate=1024, layers=LAYERS)
    folder = base / "desk"
    folder.mkdir()
    with Lab.up(base / "lab", nodes=2, backend="namespaces", cpu=[0.25, 1.0]) as lab:
        desk = Desk(folder, lab, believed_equal(lab), supervise=True)
        harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(STEPS * BATCH))
        desk.write("recut.toml", RECIPE.format(model=base / "model", steps=STEPS, every=EVERY, batch=BATCH))
        yield desk
        for run in (folder / "runs").iterdir():
            supervisor(RunPaths(run), kill=True)


def believed_equal(lab: Lab) -> Path:
    """The cluster of the lab, whose owner believes that both nodes are equally fast."""
    path = lab.cluster_file.with_name("believed.toml")
    path.write_text(re.sub("^speed = .*$", "speed = 1.0", lab.cluster_file.read_text(), flags=re.MULTILINE))
    assert path.read_text().count("speed = 1.0") == 2
    return path


def layers(plan: dict[str, Any]) -> dict[str, int]:
    return {rank["node"]: rank["stage"]["end"] - rank["stage"]["begin"] for rank in plan["ranks"]}


def test_the_layers_move_to_the_fast_node(desk: Desk) -> None:
    run = desk.launch("recut.toml")
    paths = RunPaths(desk.folder / "runs" / run.name)
    wait_until(lambda: len(run.attempts()) == 2, 200, lambda: run.logs(1))
    run.wait_for_end(2, nodes=2, timeout_s=200)
    wait_until(lambda: desk.json("status", run.name, code=None)["state"] == "done", 30)
    first, second = (store.read_object(paths.plan_json(attempt)) for attempt in (1, 2))
    assert layers(first)["node1"] == LAYERS // 2 and layers(second)["node1"] < LAYERS // 2
    assert second["resume_step"] % EVERY == 0 and not second["left_out"]
    events = [event["text"] for event in desk.json("status", run.name)["events"]]
    assert any(text.startswith("restart: by the measured speeds a step takes") for text in events), events
    assert run.attempts() == [1, 2], "they do not move back and forth"
    assert sorted(sample for ids in run.samples().values() for sample in ids) == sorted(range(STEPS * BATCH))

    alone = desk.launch("recut.toml", "--nodes", "node2")
    alone.wait_for_end(1, nodes=1, timeout_s=200)
    assert run.losses() == pytest.approx(alone.losses(), rel=TOLERANCE) and len(run.losses()) == STEPS
