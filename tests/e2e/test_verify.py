"""A run of three nodes is verified on one, two and three of them and through a pipeline; then its record is edited, and a checkpoint goes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from homelab.shared.protocol import chain
from scripts.practice.desk import Desk, Run
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(900)]

RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
rank = 4
alpha = 8
dropout = 0.0
[train]
global_batch = 12
steps = 12
learning_rate = 1e-2
warmup_steps = 2
seq_len = 128
precision = "fp32"
gradient_checkpointing = false
[checkpoint]
every_steps = 5
keep = 1
keep_every = 4
[tracking]
tensorboard = false
"""
SKIP = ("--skip", "collective", "--skip", "model")


@pytest.fixture(scope="module")
def verified(base: Path, lab: Lab, model: Path) -> Iterator[tuple[Desk, Run]]:
    folder = base / "verify"
    folder.mkdir()
    desk = Desk(folder, lab)
    harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(60))
    desk.write("kept.toml", RECIPE.format(model=model))
    run = desk.launch("kept.toml")
    run.wait_for_end(1, nodes=3)
    assert desk.json("status", run.name)["state"] == "done", run.logs(1)
    yield desk, run


def verify(desk: Desk, run: Run, *options: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = desk.json("verify", run.name, *SKIP, *options, code=code, timeout_s=300)
    return found


def test_any_nodes_and_a_pipeline_agree_and_edits_and_lost_checkpoints_are_named(verified: tuple[Desk, Run]) -> None:
    desk, run = verified
    by_chain = verify(desk, run, "--on", "node1", "--windows", "2")
    assert by_chain["verdict"] == "agrees" and by_chain["answer"].startswith(f"{run.name} agrees within fp32 rounding: steps ")
    assert by_chain["window_count"] == 3 and len(by_chain["windows"]) == 2 and by_chain["chain"] == by_chain["card_end"]
    assert all(one["nodes"] == ["node1"] and one["same_passes"] for one in by_chain["windows"])
    assert "proven" not in (desk.folder / "runs" / run.name / "verify.html").read_text()
    assert desk.json("status")["run"] == run.name, "a window is not the run that is meant without a name"
    for options, nodes in ((("--on", "node2,node3"), 2), ((), 3), (("--on", "node1,node2", "--strategy", "pipeline"), 2)):
        found = verify(desk, run, "--steps", "4..8", *options)
        (window,) = found["windows"]
        assert found["verdict"] == "agrees" and len(window["nodes"]) == nodes, found
        assert window["weights_apart"] < window["weights_bound"] / 10, window
        assert window["strategy"] == ("pipeline" if "pipeline" in options else "ddp"), window

    head = run.folder("node1")
    record = head / "final" / chain.RECORD
    if not record.exists():
        head = next(folder for name in ("node2", "node3") if ((folder := run.folder(name)) / "final").exists())
        record = head / "final" / chain.RECORD
    honest = record.read_text()
    lines = [json.loads(line) for line in honest.splitlines()]
    edited = [{**line, "loss": line["loss"] - 0.01} if line["kind"] == "train" and line["step"] == 7 else line for line in lines]
    for text, said in (
        ("".join(json.dumps(line) + "\n" for line in edited), "the line of step 7 was changed"),
        ("".join(json.dumps(line) + "\n" for line in lines[:-3]), "the record ends after step 10"),
    ):
        record.write_text(text)
        found = verify(desk, run, code=1)
        assert said in found["answer"] and found["windows"] == [], found
    record.write_text(honest)

    for step in (4, 8):  # another node has them: they come by way of this machine
        shutil.rmtree(run.folder("node2") / "checkpoints" / f"step-{step:08d}")
    found = verify(desk, run, "--steps", "4..8", "--on", "node2")
    assert found["verdict"] == "agrees" and found["windows"][0]["nodes"] == ["node2"], found
    for name in ("node1", "node2", "node3"):
        shutil.rmtree(run.folder(name) / "checkpoints" / "step-00000004")
    found = verify(desk, run, "--steps", "4..8", code=1)
    assert found["windows"][0]["verdict"] == "not computed" and "no node that answers has the checkpoint of step 4" in found["answer"]
    said = desk.homelab("verify", run.name, *SKIP, "--steps", "3..8", code=2).stderr
    assert "the checkpoint of step 3 was not kept" in said and "name two of 0, 4, 8, 12" in said


def test_changed_data_is_refused_and_named(verified: tuple[Desk, Run], base: Path, model: Path) -> None:
    """The file lies on the nodes, so homelab has no copy of it."""
    desk, _ = verified
    data = harness.write_jsonl(base / "on the nodes.jsonl", harness.chat_rows(30))
    short = RECIPE.replace('"chats.jsonl"', f'"{data}"').replace("steps = 12", "steps = 4").replace("keep_every = 4", "keep_every = 2")
    desk.write("on-node.toml", short.format(model=model))
    run = desk.launch("on-node.toml", "--nodes", "node1")
    run.wait_for_end(1, nodes=1)
    assert verify(desk, run, "--steps", "0..2")["verdict"] == "agrees"
    harness.write_jsonl(data, harness.chat_rows(31, seed=1))
    said = desk.homelab("verify", run.name, *SKIP, code=1).stderr
    assert "this data file is not the one the run began with" in said and str(data) in said and "put the old file back" in said
