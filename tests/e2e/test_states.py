"""A folder as its maker publishes it, with a part for images and layers that keep states: planned, trained in stages and with ddp, killed, asked, merged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.conftest import recipe
from tests.e2e.test_law import TOLERANCE
from tests.e2e.test_supervisor import supervisor
from tests.lab.conftest import namespaces_missing
from tests.worker import harness

pytestmark = [pytest.mark.thorough, pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(400)]
STEPS, LAYERS = 6, 8
QUESTION = ("--prompt", "red or green?", "--max-new-tokens", "24")


def folder_that_sees(base: Path) -> Path:
    """With the tokenizer of the tests' small Llama."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(harness.tiny_llama(base / "llama"))
    text: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "vocab_size": len(tokenizer),
        "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.08,
    }  # fmt: skip
    sight = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 64,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    torch.manual_seed(2)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen3_5", text_config=text, vision_config=sight))
    model.save_pretrained(base / "sees")
    tokenizer.save_pretrained(base / "sees")
    for file in (base / "sees").iterdir():
        file.chmod(0o644)
    assert json.loads((base / "sees" / "config.json").read_text())["model_type"] == "qwen3_5"
    return base / "sees"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    base = tmp_path_factory.mktemp("states")
    model, folder = folder_that_sees(base), base / "desk"
    folder.mkdir()
    with Lab.up(base / "lab", nodes=3, backend="namespaces", cpu=[0.7, 0.7, 0.7]) as lab:
        desk = Desk(folder, lab, supervise=True)
        harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(100))
        written = recipe(model, length=f"steps = {STEPS}").replace('"chats.jsonl"', f'"{folder / "chats.jsonl"}"')
        desk.write("ddp.toml", written)
        desk.write("stages.toml", written.replace("shares = { node1 = 6, node2 = 4, node3 = 2 }", 'strategy = "pipeline"'))
        yield desk
        for run in (folder / "runs").iterdir():
            supervisor(RunPaths(run), kill=True)


def ended(desk: Desk, run: Run, attempt: int) -> Run:
    run.wait_for_end(attempt, nodes=3, timeout_s=150)
    wait_until(lambda: desk.json("status", run.name, code=None)["state"] == "done", 30, lambda: run.logs(attempt))
    return run


def test_stages_that_lose_one_train_as_ddp_does(desk: Desk) -> None:
    plan = desk.json("plan", "stages.toml", "--no-dry-run")
    assert plan["strategy"] == "pipeline" and all(rank["memory"] for rank in plan["ranks"]), "the formulas know this kind"
    run = desk.launch("stages.toml")
    run.wait_for_step(1, 3)
    desk.lab.fault(next(rank["node"] for rank in plan["ranks"] if rank["stage"]["number"] == 1), "kill-worker")
    wait_until(lambda: run.attempts() == [1, 2], 100, lambda: run.logs(1))
    ended(desk, run, 2)
    beside = ended(desk, desk.launch("ddp.toml"), 1)
    assert run.losses() == pytest.approx(beside.losses(), rel=TOLERANCE) and sorted(run.losses()) == list(range(1, STEPS + 1))

    answers = [desk.json("chat", one.name, *QUESTION)["answer"] for one in (run, beside)]
    assert answers[0] == answers[1] != ""
    losses = list(desk.json("merge", run.name, timeout_s=200)["losses"].values())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4), "the merge has the adapters of all layers"
