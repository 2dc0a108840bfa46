"""QLoRA (NF4 on a CPU) and full fine-tuning from launch to an answer; two of them lose their controller. LoRA's answer is in test_law.py."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from scripts.practice.desk import Desk, Run, kill_whole, name_said, read_until
from tests.e2e.conftest import recipe

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(200)]

ALWAYS = {"README.md", "tokenizer.json", "tokenizer_config.json"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
STEPS = 12


def assert_done_seen_from(elsewhere: Desk, run: Run, steps: int) -> None:
    seen = elsewhere.json("status")  # the newest run anybody knows
    assert seen["run"] == run.name
    assert seen["state"] == "done", run.logs(1)
    assert seen["step"] == seen["total_steps"] == steps
    assert sorted(rank["node"] for rank in seen["ranks"]) == ["node1", "node2", "node3"]


def assert_answers(desk: Desk, run: Run) -> None:
    answer = desk.json("chat", run.name, "--prompt", "red or green?", "--max-new-tokens", "4", timeout_s=90)
    assert answer["run"] == run.name
    assert answer["node"] == "node1"
    assert isinstance(answer["answer"], str)


@pytest.mark.thorough
def test_full_with_the_controller_killed_right_after_launch(desk: Desk, elsewhere: Desk, model: Path) -> None:
    desk.write("full.toml", recipe(model, kind="full", length=f"steps = {STEPS}", learning_rate=1e-3))
    controller = desk.spawn("launch", "full.toml")
    said = read_until(controller, "is starting on")
    kill_whole(controller)
    run = Run(desk.lab, str(name_said(said)))
    run.wait_for_end(1, nodes=3)
    assert_done_seen_from(elsewhere, run, STEPS)
    final = run.folder("node1") / "final"
    assert {file.name for file in final.iterdir()} >= ALWAYS | {"config.json", "model.safetensors"}
    before, after = load_file(model / "model.safetensors"), load_file(final / "model.safetensors")
    assert set(before) == set(after)
    assert all(numpy.abs(after[name] - before[name]).max() > 0 for name in before)
    assert_answers(elsewhere, run)


@pytest.mark.thorough
def test_qlora_with_the_controller_killed_in_the_middle(desk: Desk, elsewhere: Desk, model: Path) -> None:
    desk.write("qlora.toml", recipe(model, kind="qlora", length=f"steps = {STEPS}"))
    controller = desk.spawn("launch", "qlora.toml", "--wait")
    said = read_until(controller, "is starting on")
    run = Run(desk.lab, str(name_said(said)))
    at = run.wait_for_step(1, 2)
    kill_whole(controller)
    assert at < STEPS
    run.wait_for_end(1, nodes=3)
    assert_done_seen_from(elsewhere, run, STEPS)
    final = run.folder("node1") / "final"
    assert {file.name for file in final.iterdir()} >= ALWAYS | ADAPTER
    assert run.losses()[STEPS] < run.losses()[1]
    assert_answers(desk, run)


@pytest.mark.thorough
def test_lora_over_a_base_in_eight_bits(desk: Desk, model: Path) -> None:
    desk.write("8bit.toml", recipe(model, length=f"steps = {STEPS}").replace('kind = "lora"', 'kind = "lora"\nbase = "8bit"'))
    run = desk.launch("8bit.toml")
    run.wait_for_end(1, nodes=3)
    assert desk.json("status", run.name)["state"] == "done", run.logs(1)
    alone = desk.launch("8bit.toml", "--nodes", "node1")
    alone.wait_for_end(1, nodes=1)
    _, together = desk.json("compare", alone.name, run.name)["runs"]
    assert together["is_same"] is True and together["common_steps"] == STEPS and together["curve_difference"] <= 1e-5
    assert_answers(desk, run)
