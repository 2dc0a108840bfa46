"""What a run has shown goes with its checkpoint: whoever is the head later tells all of it, every step once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import chain
from homelab.worker.checkpoints.curves import Curves, keep_before
from homelab.worker.checkpoints.model_card import model_card
from homelab.worker.runtime import process_group
from homelab.worker.runtime.metrics_recorder import Recorder
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.replica_check import apart
from tests.worker import harness

pytestmark = pytest.mark.timeout(120)


def task(tmp_path: Path, resume_step: int = 0, **recipe: Any) -> Task:
    sections: dict[str, Any] = {
        "model": {"name": "/home/anna/models/tiny"}, "data": {"train": "chats.jsonl"}, "method": {"kind": "full"}, **recipe,
    }  # fmt: skip
    run = {
        "name": "a-run", "recipe": sections, "recipe_hash": "r1",
        "data": {"train": {"path": "/home/anna/homelab/data/0123/chats.jsonl", "sha256": "ab"}, "eval": None},
    }  # fmt: skip
    plan = {"resume_step": resume_step, "precision": "fp32", "ranks": [{"rank": 0, "node": "node1", "share": 12}]}
    return Task(tmp_path, 2, "node1", 0, 0, 1, run, plan)


def step(number: int, loss: float) -> dict[str, Any]:
    return {
        "step": number, "loss": loss, "learning_rate": 1e-3, "grad_norm": None, "tokens_per_s": 123.456789, "step_s": 0.5, "communication_s": 0.1,
    }  # fmt: skip


def after(tmp_path: Path, steps: int, **recipe: Any) -> Curves:
    curves = Curves(task(tmp_path, **recipe))
    curves.evaluation(0, 5.5, 10.0)
    for number in range(1, steps + 1):
        curves.train(step(number, 5.0 - number / 10), 10.0 + number)
        if number % 2 == 0:
            curves.evaluation(number, 5.0 - number / 10 if number != 4 else 4.0, 10.0 + number)
    curves.agree()
    return curves


def test_where_some_ranks_alone_have_the_loss_of_an_evaluation_all_make_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were stopped in it, one before and one behind its end. Half of them would wait for the others."""
    (tmp_path / "curves.jsonl").write_text(after(tmp_path, 6).text())
    own = task(tmp_path, resume_step=6)
    gathered: list[float] = []

    def gather(values: list[float]) -> list[list[float]]:
        gathered.extend(values)
        return [values, [others]]

    monkeypatch.setattr(process_group, "gather", gather)
    others = 1.0
    assert 6 in Curves.of_all(tmp_path, own).eval_losses and gathered == [1.0]
    others = 0.0
    again = Curves.of_all(tmp_path, own)
    assert set(again.eval_losses) == {0, 2, 4} and again.is_whole and again.last == (6, 4.4)
    again.evaluation(6, 4.4, 16.0)
    again.keep_own(own)
    whole = [json.loads(line) for line in again.text().splitlines()]
    assert chain.end_of(whole) == again.chain and [line["step"] for line in whole if line["kind"] == "eval"] == [0, 2, 4, 6]


def test_of_many_attempts_the_newest_alone_keeps_what_came_before(tmp_path: Path) -> None:
    """Each copy is the whole curve: a run of months would fill the head's disk with them."""
    own, before = task(tmp_path, resume_step=6), after(tmp_path, 6)
    (tmp_path / "curves.jsonl").write_text(before.text())
    for attempt, rank in ((1, 0), (1, 1), (3, 0)):
        folder = tmp_path / "attempts" / str(attempt) / "ranks" / str(rank)
        folder.mkdir(parents=True)
        (folder / "curves.jsonl").write_text("x")
        (folder / "modules.json").write_text("[]")
    recorder = Recorder(own)
    keep_before(own, Curves.carried_by(tmp_path, own))
    recorder.train(step(7, 4.2))
    left = {str(path.relative_to(tmp_path / "attempts")) for path in tmp_path.glob("attempts/*/ranks/*/*.json*")}
    assert {"2/ranks/0/curves.jsonl", "2/ranks/0/modules.json", "1/ranks/1/modules.json", "3/ranks/0/curves.jsonl"} <= left
    assert not {"1/ranks/0/curves.jsonl", "1/ranks/0/modules.json"} & left


def test_what_a_checkpoint_carries_is_what_the_next_head_knows(tmp_path: Path) -> None:
    before = after(tmp_path, 8)
    (tmp_path / "curves.jsonl").write_text(before.text() + '{"kind": "train", "step": 3\n[]\n{"kind": "note"}\n')
    again = Curves.carried_by(tmp_path, task(tmp_path, resume_step=6))
    assert [line["step"] for line in again.before if line["kind"] == "train"] == [1, 2, 3, 4, 5, 6], "no more than the checkpoint's"
    first = next(line for line in again.before if line["kind"] == "train")
    assert again.is_whole and again.eval_losses == {0: 5.5, 2: 4.8, 4: 4.0, 6: 4.4}
    assert again.first == (1, 4.9) and first["tokens_per_s"] == 123.457 and first["grad_norm"] is None
    again.train(step(7, 4.2), 30.0)
    assert again.last == (7, 4.2)
    again.agree()
    assert [json.loads(line)["step"] for line in again.text().splitlines()] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]


def test_a_checkpoint_of_before_has_no_curves_and_says_so(tmp_path: Path) -> None:
    assert not Curves.carried_by(tmp_path, task(tmp_path, resume_step=6)).is_whole
    assert Curves.carried_by(None, task(tmp_path)).is_whole, "nothing came before"


def test_a_chain_goes_on_from_its_checkpoint_and_a_run_that_began_without_one_has_none(tmp_path: Path) -> None:
    begun = Curves(task(tmp_path))
    begun.start({"recipe_hash": "r1"})
    begun.train(step(1, 4.9) | {"batch": "ab", "passes": "01"}, 11.0)
    begun.kept(1, "00" + "ab" * 30 + "00")
    begun.agree()
    (tmp_path / "curves.jsonl").write_text(begun.text())
    again = Curves.carried_by(tmp_path, task(tmp_path, resume_step=1))
    again.start({"recipe_hash": "r2"})
    again.train(step(2, 4.8), 12.0)
    again.keep_own(task(tmp_path))
    lines = [json.loads(line) for line in again.text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [("start", 0), ("train", 1), ("kept", 1), ("train", 2)]
    assert lines[2]["sha256"] == "00" + "ab" * 30 + "00" and lines[1]["batch"] == "ab" and lines[0]["recipe_hash"] == "r1"
    assert chain.first_break(lines) is None and again.chain == lines[-1]["chain"]
    assert f"chain: `{again.chain}`" in model_card(task(tmp_path), again, 2, is_moved_by_peft=False)

    older = [{name: value for name, value in line.items() if name != "chain"} for line in lines if line["kind"] == "train"]
    (tmp_path / "curves.jsonl").write_text("".join(json.dumps(line) + "\n" for line in older))
    resumed = Curves.carried_by(tmp_path, task(tmp_path, resume_step=2))
    resumed.start({"recipe_hash": "r1"})
    resumed.train(step(3, 4.7), 13.0)
    resumed.agree()
    assert resumed.chain == "" and "chain" not in resumed.text() and resumed.last == (3, 4.7)
    assert "chain" not in model_card(task(tmp_path), resumed, 3, is_moved_by_peft=False)


def test_the_card_tells_the_whole_run_in_few_rows_and_names_no_folder_of_a_machine(tmp_path: Path) -> None:
    curves = after(tmp_path, 100, tracking={"eval_every_steps": 2})
    card = model_card(task(tmp_path), curves, 100, is_moved_by_peft=False)
    assert "PEFT without homelab" not in card and "PEFT without homelab" in model_card(task(tmp_path), curves, 100, is_moved_by_peft=True)
    rows = [line for line in card.splitlines() if line.startswith("| ") and "loss per token" not in line]
    assert rows == [
        "| held-out rows, step 0 (before training) | 5.5000 | 244.69 |",
        "| held-out rows, step 100 (the best, the end) | -5.0000 | 0.01 |",
        "| training, first step (1) | 4.9000 | 134.29 |",
        "| training, last step (100) | -5.0000 | 0.01 |",
    ]
    assert "| held-out rows, step 4 (the best) | 4.0000 |" in model_card(task(tmp_path), after(tmp_path, 8), 8, is_moved_by_peft=False)
    assert "anna" not in card and "- train: `chats.jsonl`, sha256 `ab`" in card and 'base_model: "tiny"' in card


def test_how_far_copies_are_apart_sees_differences_that_cancel_in_a_sum() -> None:
    torch = pytest.importorskip("torch")
    from homelab.worker.model.weight_digests import trained as digest
    from homelab.worker.strategies.replica_check import marks, trained

    model = torch.nn.Linear(300, 200)
    other = torch.nn.Linear(300, 200)
    other.load_state_dict(model.state_dict())
    same = [marks(trained(model)), marks(trained(other)), marks(trained(other))]
    assert apart(same) == (0.0, []) and digest(model) == digest(other)
    with torch.no_grad():
        first, second = other.weight[0, 0].item(), other.weight[0, 1].item()
        other.weight[0, 0], other.weight[0, 1] = second, first
    assert digest(model) != digest(other)
    size = sum(float((weight.detach().double() ** 2).sum()) for weight in model.parameters()) ** 0.5
    moved = abs(first - second) * 2**0.5 / size
    far, odd = apart([marks(trained(model)), marks(trained(other)), marks(trained(model))])
    assert moved / 4 < far < moved * 4 and odd == [1]
    assert apart([marks(trained(model)), marks(trained(other))])[1] == [0, 1], "of two nobody knows which is right"


@pytest.mark.thorough
def test_with_a_moved_head_tensorboards_own_reader_and_the_card_hold_every_step_once(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    recipe: dict[str, Any] = {
        "train__steps": 8,
        "train__epochs": None,
        "tracking__tensorboard": True,
        "tracking__eval_every_steps": 2,
        "data__eval_fraction": 0.2,
    }
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    forks.train(run, 1, [12], micro_batch=4)
    moved = tmp_path / "moved"  # another machine's disk: it has received the checkpoint, and nothing else
    shutil.copytree(run / "checkpoints/step-00000004", moved / "checkpoints/step-00000004")
    shutil.copy(run / "run.json", moved)
    forks.train(moved, 2, [12], micro_batch=4, resume_step=4)
    assert told(moved) == told(run)
    forks.train(moved, 3, [12], micro_batch=4, resume_step=6)  # and the same head once more
    forks.train(moved, 4, [12], micro_batch=4, resume_step=8)  # killed before it wrote final/
    assert told(moved) == told(run)
    before = [json.loads(line) for line in (moved / "attempts/4/ranks/0/curves.jsonl").read_text().splitlines()]
    assert [line["step"] for line in before if line["kind"] == "train"] == list(range(1, 9))
    assert [line["attempt"] for line in before if line["kind"] == "train"] == [1] * 4 + [2] * 2 + [3] * 2


def told(run: Path) -> dict[str, Any]:
    """Tag -> (steps, values) as TensorBoard shows them, and the rows of the model card."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard"))
    reader.Reload()
    found: dict[str, Any] = {
        tag: [(event.step, round(event.value, 4)) for event in reader.Scalars(tag)]
        for tag in ("train/loss", "train/learning_rate", "eval/loss")
    }
    assert [number for number, _ in found["train/loss"]] == list(range(1, 9))
    assert [number for number, _ in found["eval/loss"]] == [0, 2, 4, 6, 8]
    card = (run / "final/README.md").read_text()
    found["card"] = [line for line in card.splitlines() if line.startswith("| ")]
    assert "step 0 (before training)" in card and "first step (1)" in card and "last step (8)" in card
    return found
