"""Killed twice, resumed with other shares and other numbers of processes: the curve goes on to the last digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from homelab.worker.checkpoints import checkpoint_folder
from tests.worker import harness
from tests.worker.training.test_law import TOLERANCE, assert_every_sample_once_per_epoch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def test_a_run_that_was_killed_twice_ends_like_an_undisturbed_one(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe: dict[str, Any] = {"method__kind": "lora", "train__epochs": 3}  # 4 steps per epoch
    undisturbed = harness.make_run(tmp_path / "undisturbed", model, data, **recipe)
    forks.train(undisturbed, 1, [12], micro_batch=4)

    run = harness.make_run(tmp_path / "killed", model, data, **recipe)
    forks.killed(run, 1, [6, 4, 2], micro_batch=[2, 3, 1], rank=2, step=3)
    first = checkpoint_folder.complete_steps(run / "checkpoints")[-1]
    assert 2 <= first < 12
    forks.killed(run, 2, [5, 7], micro_batch=4, resume_step=first, rank=0, step=first + 3)
    second = checkpoint_folder.complete_steps(run / "checkpoints")[-1]
    assert first < second < 12, "the second attempt must have got further, and must have been killed before the end"
    forks.train(run, 3, [12], micro_batch=5, resume_step=second)

    expected = harness.losses(undisturbed, 1)
    found = {}
    for attempt in (1, 2, 3):
        found |= harness.losses(run, attempt)
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert min(harness.losses(run, 3)) == second + 1, "resuming repeats no step"
    assert harness.relative_error(harness.weights(run, 12), harness.weights(undisturbed, 12)) < TOLERANCE
    assert_every_sample_once_per_epoch(run, {1: first, 2: second, 3: 12}, ranks=3, steps=12)
    rates = [line["learning_rate"] for line in harness.lines(undisturbed, 1, 0, "metrics.jsonl", "train")]
    assert [line["learning_rate"] for line in harness.lines(run, 3, 0, "metrics.jsonl", "train")] == rates[second:]


def test_a_damaged_or_foreign_checkpoint_is_refused_with_one_message(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", model, data, train__steps=2, train__epochs=None)
    forks.train(run, 1, [12])
    weights = run / "checkpoints" / "step-00000002" / "trainable.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    codes, output = forks.run(run, 2, [12], resume_step=2)
    assert codes == [2]
    assert "sha256" in output and "Traceback" not in output and output.count("error:") == 1
    error = harness.error_of(run, 2)
    assert error["where"] == str(weights) and "homelab recover" in error["hint"]
