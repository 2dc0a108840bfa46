"""A model that a node cannot hold, nor all nodes together, trains on them: a real limit of memory, layers from the disk, a killed rank, a chat."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, Run
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1200)]
REAL = os.environ.get("HOMELAB_MODEL", "")

RECIPE = """
[model]
name = "{model}"
[data]
train = "pirates.jsonl"
[method]
kind = "lora"
rank = 8
alpha = 16
[train]
global_batch = {batch}
steps = 8
learning_rate = 5e-4
seq_len = 64
precision = "fp32"
gradient_checkpointing = true
[checkpoint]
every_steps = 3
[tracking]
tensorboard = false
"""


@pytest.mark.skipif(not Path(REAL, "config.json").is_file(), reason="HOMELAB_MODEL names no model")
def test_a_model_that_no_node_can_hold_trains_is_killed_recovers_and_answers(tmp_path: Path) -> None:
    """In fp32 the model and its training hold 1.35 GB on one node."""
    _story(tmp_path, Path(shutil.copytree(REAL, tmp_path / "model")), 12, {"resident": (4.0,), "streamed": (1.25,)})


def test_a_model_that_all_nodes_together_cannot_hold(tmp_path: Path) -> None:
    """2.9 GB of weights on two nodes of 1.3 GB, as a pipeline."""
    model = harness.tiny_llama(tmp_path / "model", hidden=1536, intermediate=4096, layers=28)
    assert sum(file.stat().st_size for file in model.glob("*.safetensors")) > 2 * 1.3e9
    _story(tmp_path, model, 4, {"resident": (8.0,), "streamed": (1.3, 1.3)})


def _story(tmp_path: Path, model: Path, batch: int, limits_gb: dict[str, tuple[float, ...]]) -> None:
    losses = {}
    for name, memory_gb in limits_gb.items():
        with Lab.up(tmp_path / name, nodes=len(memory_gb), memory=memory_gb, shared=[model]) as lab:
            folder = tmp_path / f"{name} desk"
            folder.mkdir()
            rows = [("user", f"Number {number}?", f"Arr, {number} coins!") for number in range(60)]
            (folder / "pirates.jsonl").write_text(
                "".join(
                    json.dumps({"messages": [{"role": role, "content": asked}, {"role": "assistant", "content": answer}]}) + "\n"
                    for role, asked, answer in rows
                )
            )
            desk = Desk(folder, lab, supervise=True)
            desk.write("pirate.toml", RECIPE.format(model=model, batch=batch))
            streaming = [rank["streaming"] for rank in desk.json("plan", "pirate.toml")["ranks"]]
            assert [one is not None for one in streaming] == [name != "resident"] * len(memory_gb), streaming
            run = desk.launch("pirate.toml")
            if name != "resident":
                _kill(lab, run, f"node{len(memory_gb)}")
            run.wait_for_end(1 if name == "resident" else 2, nodes=len(memory_gb), timeout_s=600)
            assert desk.json("status", run.name)["state"] == "done", run.logs(1)
            losses[name] = run.losses()
            if name == "streamed":
                assert desk.homelab("chat", run.name, "--prompt", "Number 7?", timeout_s=300).stdout.strip()
    assert losses["streamed"] == pytest.approx(losses["resident"], rel=1e-5)


def _kill(lab: Lab, run: Run, node: str) -> None:
    run.wait_for_step(1, 4, timeout_s=400)
    lab.fault(node, "kill-worker")
