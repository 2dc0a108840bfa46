"""A model that no node can hold trains across three of them, loses a stage on the way, and ends as on a node that can hold it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab, cgroup, nodes
from homelab.lab.cgroup import find_hierarchies
from homelab.shared.protocol import phases
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_law import TOLERANCE
from tests.e2e.test_supervisor import supervisor
from tests.lab.conftest import namespaces_missing
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600)]

STEPS = 7
LIMITS_GB = [1.35, 1.3, 1.4, 6.0]  # 0.9 GB of weights in fp32, beside what Python, torch and transformers take
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
global_batch = 4
steps = {steps}
learning_rate = 1e-3
seq_len = 128
precision = "fp32"
gradient_checkpointing = false
[checkpoint]
every_steps = 2
[tracking]
tensorboard = false
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    if find_hierarchies().memory is None:
        pytest.skip("there is no control group for memory that we may write")
    base = tmp_path_factory.mktemp("pipeline")
    in_bf16(harness.tiny_llama(base / "model", hidden=1024, intermediate=2048, layers=24))
    folder = base / "desk"
    folder.mkdir()
    with Lab.up(base / "lab", nodes=4, backend="namespaces", cpu=[0.7, 0.7, 0.7, 1.0], memory=LIMITS_GB) as lab:
        desk = Desk(folder, lab, supervise=True)
        harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(100))
        desk.write("pipeline.toml", RECIPE.format(model=base / "model", steps=STEPS))
        yield desk
        for run in (folder / "runs").iterdir():
            supervisor(RunPaths(run), kill=True)


def in_bf16(model: Path) -> None:
    """Store the weights as hubs do: read in fp32 they are memory of the process, and no pages of a file that others have read."""
    import torch
    from safetensors.torch import load_file, save_file

    file = model / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(str(file)).items()}, str(file), metadata={"format": "pt"})


def train_alone(desk: Desk, node: str) -> tuple[int, str]:
    """(exit code, output) of the worker itself with the whole model, as a process of this node: nothing but its memory is in the way."""
    folder = desk.folder.parent
    run = harness.make_run(
        folder / f"alone on {node}", folder / "model", desk.folder / "chats.jsonl", method__kind="lora", train__global_batch=8, train__steps=1, train__epochs=None,
    )  # fmt: skip
    harness.make_plan(run, 1, [8], micro_batch=1)
    members = nodes.group(desk.lab.state, desk.lab.state.node(node), cgroup.find_hierarchies()).member_files()
    move = "".join(f"echo 0 > {file}; " for file in members)
    command = ["sh", "-c", f'{move} exec "$@"', "sh", sys.executable, "-m", "homelab.worker"]
    environment = harness.outside() | harness.worker_environment(run, 1, "here")
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200)
    return ended.returncode, ended.stdout


def test_no_node_can_hold_the_model(desk: Desk) -> None:
    for node in ("node1", "node2", "node3"):
        code, output = train_alone(desk, node)
        assert code == -9, f"the kernel kills it\n{output}"
    code, output = train_alone(desk, "node4")
    assert code == 0, output
    (rank,) = desk.json("plan", "pipeline.toml", "--nodes", "node1", "--no-dry-run")["ranks"]
    assert rank["streaming"]["layers"] > 0, "alone it would have layers on its disk"


def test_it_trains_across_three_and_survives_a_dead_stage(desk: Desk) -> None:
    three = ("--nodes", "node1,node2,node3")
    plan = desk.json("plan", "pipeline.toml", *three, "--no-dry-run")
    assert plan["strategy"] == "pipeline" and {price["name"] for price in plan["strategies"] if price["refused"]} >= {"ddp", "zero2"}
    assert sorted(layer for rank in plan["ranks"] for layer in range(rank["stage"]["begin"], rank["stage"]["end"])) == list(range(24))
    middle = next(rank["node"] for rank in plan["ranks"] if rank["stage"]["number"] == 1)

    run = desk.launch("pipeline.toml", *three)
    run.wait_for_step(1, 4, timeout_s=200)
    desk.lab.fault(middle, "kill-worker")
    wait_until(lambda: run.attempts() == [1, 2], 100, lambda: told(desk, run))
    run.wait_for_end(2, nodes=3, timeout_s=200)
    wait_until(lambda: desk.json("status", run.name, code=None)["state"] == "done", 30)
    alone = desk.launch("pipeline.toml", "--nodes", "node4")
    alone.wait_for_end(1, nodes=1, timeout_s=200)
    assert desk.json("status", alone.name)["state"] == "done", alone.logs(1)
    losses, expected = run.losses(), alone.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[STEPS] < expected[1]
    assert harness.whole_error(tensors(run.folder("node1")), tensors(alone.folder("node4"))) <= TOLERANCE


def test_a_node_that_vanishes_while_its_stage_is_loaded(desk: Desk) -> None:
    """Nothing was trained yet: the run begins anew on the node that can hold the whole model."""
    run = desk.launch("pipeline.toml", "--nodes", "node3,node4")
    assert store.read_object(RunPaths(desk.folder / "runs" / run.name).plan_json(1))["strategy"] == "pipeline"
    wait_until(lambda: run.heartbeat(1).get("phase") == phases.LOADING, 100, lambda: run.logs(1))
    desk.lab.fault("node3", "power-cut")
    try:
        wait_until(lambda: run.attempts() == [1, 2], 100, lambda: told(desk, run))
        run.wait_for_end(2, nodes=1, timeout_s=200)
        wait_until(lambda: desk.json("status", run.name, code=None)["state"] == "done", 30)
    finally:
        desk.lab.fault("node3", "power-on")
    assert sorted(run.losses()) == list(range(1, STEPS + 1)) and not list(run.folder("node3").glob("attempts/2/ranks/*"))


def told(desk: Desk, run: Run) -> str:
    """What happened, and how long each rank has been still."""
    said = desk.json("status", run.name, code=None)
    return "\n".join([*(event["text"] for event in said["events"]), run.logs(1)[-3000:]])


def tensors(folder: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return load_file(str(folder / "final" / "adapter_model.safetensors"))
