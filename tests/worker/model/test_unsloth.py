"""The law with backend unsloth, in its own environment: scripts/test --unsloth (about two minutes).

Its CPU backend trains tiny models for real. Its Trainer for cards is tried with transformers' model: UNSLOTH_ALLOW_CPU=1 loads what
Unsloth loads where a card is (unsloth_zoo/device_type.py), and its patches of the Trainer are applied as its loader applies them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.checkpoints import checkpoint_folder
from tests.worker import harness

pytestmark = [pytest.mark.unsloth, pytest.mark.slow, pytest.mark.timeout(560)]

STEPS = 16
LAW = 1e-5  # relative, in fp32
RECIPE: dict[str, Any] = {"method__kind": "lora", "train__steps": STEPS, "train__epochs": None, "train__seed": 2}
PATIENCE_S = 300.0  # for imports: every rank loads transformers, TRL and Unsloth


def train(run: Path, attempt: int, shares: list[int], **plan: Any) -> str:
    harness.make_plan(run, attempt, shares, **plan)
    code, output = harness.finish(harness.start(run, attempt, len(shares)), timeout_s=PATIENCE_S)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """The training of one process."""
    run = harness.make_run(tmp_path_factory.mktemp("one") / "run", model, data, **RECIPE, method__backend="unsloth")
    train(run, 1, [12], micro_batch=5)
    return run


def assert_the_same(run: Path, attempts: list[int], one: Path) -> None:
    found = {step: loss for attempt in attempts for step, loss in harness.losses(run, attempt).items()}
    assert found == pytest.approx(harness.losses(one, 1), rel=LAW) and len(found) == STEPS
    error = harness.relative_error(harness.weights(run, STEPS), harness.weights(one, STEPS))
    print(
        f"weights differ by {error:.1e}, losses by {max(abs(found[step] / loss - 1) for step, loss in harness.losses(one, 1).items()):.1e}"
    )
    assert error <= LAW


def test_three_ranks_with_uneven_shares_and_a_kill_end_like_one(one: Path, tmp_path: Path, model: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "killed", model, data, **RECIPE, method__backend="unsloth", train__gradient_checkpointing=True)
    harness.make_plan(run, 1, [6, 4, 2], micro_batch=[2, 3, 1])
    process = harness.start(run, 1, 3)
    harness.wait_for(lambda: bool(harness.losses(run, 1, rank=2)), timeout_s=PATIENCE_S)  # its first step is done
    harness.kill_when(run, 1, rank=2, step=3)
    code, _ = harness.finish(process)
    assert code != 0
    step = checkpoint_folder.complete_steps(run / "checkpoints")[-1]
    assert 2 <= step < STEPS
    train(run, 2, [2, 3, 7], micro_batch=[1, 3, 4], resume_step=step)
    assert_the_same(run, [1, 2], one)
    assert harness.samples(run, 2, 3) == {number: ids for number, ids in harness.samples(one, 1, 1).items() if number > step}
    notes = [line["message"] for line in harness.lines(run, 2, 0, "metrics.jsonl", "note")]
    assert any("backend: unsloth" in note for note in notes)


def test_it_is_the_training_of_transformers(one: Path, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """The same adapters from the same seed, the same curve: a run may go on with the other backend."""
    run = harness.make_run(tmp_path / "transformers", model, data, **RECIPE)
    forks.train(run, 1, [12], micro_batch=4)
    assert_the_same(run, [1], one)


def test_under_its_trainer_for_cards_too(one: Path, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    """Unsloth rewrites Trainer.training_step, compute_loss and get_batch_samples; each rank's loss still counts by all tokens."""
    run = harness.make_run(tmp_path / "patched", model, data, **RECIPE)
    entry = "tests.worker.model.test_unsloth:main_under_its_trainer"
    codes, output = forks.run(run, 1, [7, 5], micro_batch=[2, 3], entry=entry, timeout_s=PATIENCE_S)
    assert codes == [0, 0], output
    assert output.count("trained under _unsloth") == 2
    assert_the_same(run, [1], one)


def main_under_its_trainer() -> int:
    """What a rank runs: the worker's own main, after Unsloth has changed the Trainer."""
    own = str(Path(os.environ["HOMELAB_RUN_DIR"]) / "unsloth")  # for code that it writes
    os.environ |= {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_COMPILE_LOCATION": own}
    import unsloth  # noqa: F401
    from transformers import Trainer
    from unsloth.models._utils import patch_gradient_accumulation_fix

    from homelab.worker.training.train import main

    patch_gradient_accumulation_fix(Trainer)
    assert (
        Trainer.compute_loss.__name__ == "_unsloth_pre_compute_loss" and Trainer.get_batch_samples.__name__ == "_unsloth_get_batch_samples"
    )
    print(f"trained under {Trainer.training_step.__name__}", flush=True)
    return main()


def test_an_optimizer_that_it_would_replace_is_refused(tmp_path: Path, model: Path, data: Path) -> None:
    recipe = RECIPE | {"train__optimizer": "adamw_8bit", "method__backend": "unsloth"}
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    harness.make_plan(run, 1, [12])
    code, output = harness.finish(harness.start(run, 1, 1), timeout_s=PATIENCE_S)
    assert code == 2 and "a different training" in output and "Traceback" not in output
    assert harness.error_of(run, 1)["where"] == "[train] optimizer in the recipe"
