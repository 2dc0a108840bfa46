"""One lab of three nodes for the whole folder, one recipe that is the law, and a look at the nodes after every test."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, copy_of_cluster, left_on, wait_until
from tests.lab.conftest import namespaces_missing
from tests.worker import harness

ROWS = 100
EPOCHS = 4
GLOBAL_BATCH = 12
STEPS = EPOCHS * -(-ROWS // GLOBAL_BATCH)  # 9 per epoch, the last of them with 4 rows

LAW = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "{kind}"
rank = 4
alpha = 8
dropout = 0.0
[train]
global_batch = {global_batch}
{length}
learning_rate = {learning_rate}
warmup_steps = 2
seq_len = 256
weight_decay = 0.01
max_grad_norm = 0.5
precision = "fp32"
gradient_checkpointing = false
[parallel]
shares = {{ node1 = 6, node2 = 4, node3 = 2 }}
micro_batch = 4
[checkpoint]
every_steps = 10
[tracking]
tensorboard = false
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all that follows. It holds the lab's folder, so the nodes see the model in it, too."""
    return tmp_path_factory.mktemp("e2e")


@pytest.fixture(scope="session")
def model(base: Path) -> Path:
    return harness.tiny_llama(base / "tiny-llama")


@pytest.fixture(scope="session")
def lab(base: Path) -> Iterator[Lab]:
    """Three nodes, each with its own network, file system view and one core at most."""
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    with Lab.up(base / "lab", nodes=3, backend="namespaces", cpu=[1.0]) as started:
        yield started


@pytest.fixture(scope="session")
def desk(base: Path, lab: Lab, model: Path) -> Desk:
    """The desk where the recipes lie."""
    folder = base / "desk"
    folder.mkdir()
    desk = Desk(folder, lab)
    harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(ROWS))
    desk.write("law.toml", recipe(model))
    for name, text in (("all_reduce", ALL_REDUCE), ("sleeper", SLEEPER)):
        desk.write(f"{name}.py", text)
        desk.write(f"{name}.toml", f'[script]\npath = "{name}.py"\n')
    return desk


@pytest.fixture(scope="module")
def elsewhere(request: pytest.FixtureRequest, base: Path, lab: Lab) -> Desk:
    """Another directory with nothing but a copy of cluster.toml in it."""
    folder = base / f"second laptop of {request.module.__name__}"
    return Desk(folder, lab, copy_of_cluster(lab, folder))


ALL_REDUCE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
value = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(value)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: the sum is {value.item():g}")
dist.destroy_process_group()
"""

# A worker with a child that has left its session: what a data loader that was reparented looks like.
SLEEPER = """
import subprocess, time
subprocess.Popen(["setsid", "--fork", "sleep", "600"])
print("asleep", flush=True)
time.sleep(600)
"""


def recipe(model: Path, *, kind: str = "lora", length: str = f"epochs = {EPOCHS}", learning_rate: float = 1e-2) -> str:
    """The text of a recipe for the tiny model and the chats."""
    return LAW.format(model=model, kind=kind, length=length, learning_rate=learning_rate, global_batch=GLOBAL_BATCH)


@pytest.fixture(scope="session")
def reference(desk: Desk) -> Run:
    """The recipe on one node alone: what every other way to train it is compared with."""
    run = desk.launch("law.toml", "--nodes", "node1")
    run.wait_for_end(1, nodes=1)
    assert desk.json("status", run.name)["state"] == "done", run.logs(1)
    return run


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test: no process of any run on any node, and every node has power again."""
    yield
    if "lab" not in request.fixturenames:
        return
    lab: Lab = request.getfixturevalue("lab")
    try:
        wait_until(lambda: not left_on(lab), 10.0, lambda: f"left on the nodes: {left_on(lab)}")
    finally:
        procfs.send(left_on(lab), signal.SIGKILL)
        for node in lab.status()["nodes"]:
            if node["power"] == "off":
                lab.fault(node["name"], "power-on")
