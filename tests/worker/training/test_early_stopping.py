"""[train] early_stopping and keep_best: the same end and the same model on any cluster, also after a fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from homelab.shared.law import early_stopping
from homelab.shared.protocol.manifest import folder_name
from homelab.worker.checkpoints import checkpoint_folder
from tests.worker import harness
from tests.worker.training.test_law import TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

# So much that it learns its rows by heart, and the others get worse.
RECIPE = {
    "train__epochs": 10,
    "train__learning_rate": 2e-2,
    "train__schedule": "constant",
    "tracking__eval_every_steps": 2,
    "train__keep_best": True,
    "train__early_stopping": 3,
}


@pytest.fixture(scope="module")
def undisturbed(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    run = made(tmp_path_factory.mktemp("undisturbed") / "run", model, data)
    forks.train(run, 1, [12], micro_batch=4)
    return run


def made(folder: Path, model: Path, data: Path) -> Path:
    rows = harness.chat_rows(9)
    for row in rows:  # nothing that is learnt from the others helps here
        row["messages"][-1]["content"] = row["messages"][-1]["content"][::-1]
    held_out = harness.write_jsonl(folder.parent / "eval.jsonl", rows)
    return harness.make_run(folder, model, data, eval_data=held_out, **RECIPE, data__eval="eval.jsonl")


def held_out_losses(run: Path, attempt: int) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in harness.lines(run, attempt, 0, "metrics.jsonl", "eval")}


def final_weights(run: Path) -> dict[str, object]:
    from safetensors.torch import load_file

    return dict(load_file(str(run / "final/model.safetensors")))


def test_it_ends_when_the_held_out_loss_no_longer_falls_and_keeps_the_best(undisturbed: Path) -> None:
    losses = held_out_losses(undisturbed, 1)
    best, last = early_stopping.best_step(losses), max(losses)
    assert best is not None and 2 <= best < last < 40 and last == best + 6, "choose another learning rate: the test wants a minimum"
    assert max(harness.losses(undisturbed, 1)) == last
    notes = [line["message"] for line in harness.lines(undisturbed, 1, 0, "metrics.jsonl", "note")]
    assert any(f"stopped after step {last} of " in note and f"since step {best} " in note for note in notes)
    assert json.loads((undisturbed / "attempts/1/ranks/0/heartbeat.json").read_text())["total_steps"] == last
    assert harness.relative_error(final_weights(undisturbed), harness.weights(undisturbed, best)) == 0
    assert f"after step {best}, the best" in (undisturbed / "final/README.md").read_text()


def test_another_cluster_and_a_fault_change_neither_the_end_nor_the_model(
    forks: harness.Forks, tmp_path: Path, undisturbed: Path, model: Path, data: Path
) -> None:
    expected = held_out_losses(undisturbed, 1)
    best, last = early_stopping.best_step(expected), max(expected)
    assert best is not None
    run = made(tmp_path / "run", model, data)
    forks.train(run, 1, [7, 5], micro_batch=2)
    assert held_out_losses(run, 1) == pytest.approx(expected, rel=TOLERANCE)
    # As if it had been killed after any of its steps: what it goes on from decides alone, and what was left behind by the first attempt does not count.
    for attempt, resume in enumerate((best, best + 2, last), start=2):
        shutil.rmtree(run / "final")
        for leftover in (run / "best").iterdir():
            leftover.unlink()
            shutil.copyfile(run / "checkpoints" / folder_name(2) / "trainable.safetensors", leftover)
        forks.train(run, attempt, [3, 4, 5], micro_batch=4, resume_step=resume)
        losses = {step: loss for step, loss in expected.items() if step >= resume}
        assert held_out_losses(run, attempt) == pytest.approx(losses, rel=TOLERANCE)
        assert max(harness.losses(run, attempt), default=last) == last
        assert harness.relative_error(final_weights(run), final_weights(undisturbed)) < TOLERANCE


def test_a_checkpoint_carries_the_best_weights_up_to_it(undisturbed: Path) -> None:
    best, last = early_stopping.best_step(held_out_losses(undisturbed, 1)), max(held_out_losses(undisturbed, 1))
    assert best is not None
    folders = {step: undisturbed / "checkpoints" / folder_name(step) for step in (2, best, last)}
    assert not (folders[2] / "best.safetensors").exists(), "nothing was evaluated before it"
    manifest = checkpoint_folder.read_manifest(folders[last])
    assert manifest is not None and "best.safetensors" in manifest["files"]
    kept = undisturbed / f"best/step-{best:08d}.safetensors"
    assert (folders[last] / "best.safetensors").samefile(kept), "written once"
    assert [path.name for path in (undisturbed / "best").iterdir()] == [kept.name]
