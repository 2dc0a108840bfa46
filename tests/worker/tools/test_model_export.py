"""A checkpoint in the format of final/ holds the same weights as final/ of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file

from homelab.worker.checkpoints import checkpoint_folder
from homelab.worker.checkpoints.tensor_files import writers_of
from homelab.worker.checkpoints.weights import WEIGHTS, buffers, trained
from homelab.worker.errors import WorkerError
from homelab.worker.model.build import load_base, load_model
from homelab.worker.tools import chat, model_export, run_model
from tests.worker import harness
from tests.worker.model import tiny_models


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_is_what_final_would_be(tmp_path: Path, model: Path, data: Path, kind: str) -> None:
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind=kind)
    harness.make_plan(run_dir, 1, [12])
    run = run_model.read_run(run_dir)
    built = load_model(run_model.task_of(run, run_dir), str(model), lambda note: None)
    with torch.no_grad():
        for weight in built.parameters():
            if weight.requires_grad:
                weight.add_(0.01)
    checkpoint_folder.write(run_dir / "checkpoints", 3, run["recipe_hash"], writers_of({WEIGHTS: trained(built)}))
    built.save_pretrained(tmp_path / "wanted")
    assert model_export.export(run_dir, 3) == "exports/step-00000003"
    for name in ("adapter_model" if kind == "lora" else "model",):
        wanted, made = (load_file(folder / f"{name}.safetensors") for folder in (tmp_path / "wanted", run_dir / "exports/step-00000003"))
        assert wanted.keys() == made.keys() and all(torch.equal(wanted[key], made[key]) for key in wanted)
    files = {path.name for path in (run_dir / "exports/step-00000003").iterdir()}
    assert {"README.md", "tokenizer.json"} <= files
    if kind == "lora":
        from peft import PeftModel

        asked = PeftModel.from_pretrained(load_base(str(model), None, None, torch.float32, None, ""), run_dir / "exports/step-00000003")
        tokens = torch.arange(3, 20).view(1, -1)
        assert torch.equal(asked.eval()(input_ids=tokens).logits, built.eval()(input_ids=tokens).logits)


@pytest.mark.timeout(120)
def test_a_checkpoint_of_a_model_that_sees_is_fetched_and_asked_with_the_tower_of_its_base(
    tmp_path: Path, tokenizer: Any, data: Path
) -> None:
    sees = tiny_models.folder("gemma3", tmp_path / "gemma3", tokenizer)
    run_dir = harness.make_run(tmp_path / "run", sees, data, method__kind="full")
    harness.make_plan(run_dir, 1, [12])
    run = run_model.read_run(run_dir)
    built = load_model(run_model.task_of(run, run_dir), str(sees), lambda note: None)
    with torch.no_grad():
        for weight in trained(built).values():
            weight.add_(0.01)
    held = trained(built)
    assert not any("vision_tower" in name for name in held)
    folder = checkpoint_folder.write(run_dir / "checkpoints", 3, run["recipe_hash"], writers_of({WEIGHTS: held}))
    exported = load_base(str(run_dir / model_export.export(run_dir, 3)), None, None, torch.float32, None, "")
    asked = chat.load(run, run_dir, str(sees), folder, None)
    for found in (exported, asked):
        weights = dict(found.named_parameters())
        assert all(torch.equal(weights[name], weight) for name, weight in built.named_parameters())
    lost = next(name for name in held if "layers.1" in name)
    checkpoint_folder.write(
        run_dir / "checkpoints", 4, run["recipe_hash"], writers_of({WEIGHTS: {name: held[name] for name in held if name != lost}})
    )
    with pytest.raises(WorkerError, match=f"{lost} is missing"):
        model_export.export(run_dir, 4)


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma4_text", "lfm2_moe"])
def test_a_checkpoint_is_fetched_with_what_is_no_weight_of_its_base(kind: str, tmp_path: Path, tokenizer: Any, data: Path) -> None:
    model = tiny_models.folder_with_buffers(kind, tmp_path / kind, tokenizer)
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind="full")
    harness.make_plan(run_dir, 1, [12], precision="bf16")
    run = run_model.read_run(run_dir)
    built = load_model(run_model.task_of(run, run_dir), str(model), lambda note: None)
    with torch.no_grad():
        for weight in trained(built).values():
            weight.add_(0.01)
            weight.copy_(weight.bfloat16())  # as its file will have it
    checkpoint_folder.write(run_dir / "checkpoints", 3, run["recipe_hash"], writers_of({WEIGHTS: trained(built)}))
    exported = load_base(str(run_dir / model_export.export(run_dir, 3)), None, None, torch.float32, None, "")
    assert buffers(built) and all(buffers(exported)[name].equal(buffer) for name, buffer in buffers(built).items())
    tokens = torch.arange(3, 20).view(1, -1)
    with torch.no_grad():
        assert torch.equal(exported.eval()(input_ids=tokens).logits, built.eval()(input_ids=tokens).logits)


def test_adapters_that_score_are_what_final_would_be(tmp_path: Path, model: Path, data: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    changes: dict[str, Any] = {"method__kind": "lora", "objective__kind": "reward"}
    run_dir = harness.make_run(tmp_path / "run", model, data, **changes)
    harness.make_plan(run_dir, 1, [12])
    run = run_model.read_run(run_dir)
    built = load_model(run_model.task_of(run, run_dir), str(model), lambda note: None)
    with torch.no_grad():
        for weight in built.parameters():
            if weight.requires_grad:
                weight.add_(0.01)
    checkpoint_folder.write(run_dir / "checkpoints", 3, run["recipe_hash"], writers_of({WEIGHTS: trained(built)}))
    exported = run_dir / model_export.export(run_dir, 3)
    asked = AutoPeftModelForSequenceClassification.from_pretrained(str(exported), num_labels=1, dtype=torch.float32).eval()
    tokens = torch.arange(3, 20).view(1, -1)
    assert float(asked(input_ids=tokens).logits) == pytest.approx(float(built.eval()(input_ids=tokens).logits[0, -1]), rel=1e-5)
    whole = harness.make_run(tmp_path / "whole", model, data, **changes | {"method__kind": "full"})
    harness.make_plan(whole, 1, [12])
    checkpoint_folder.write(whole / "checkpoints", 3, run_model.read_run(whole)["recipe_hash"], writers_of({"x.json": {}}))
    with pytest.raises(WorkerError) as error:
        model_export.export(whole, 3)
    assert "let the run end" in error.value.hint


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, model: Path, data: Path) -> None:
    run_dir = harness.make_run(tmp_path / "run", model, data, method__kind="lora")
    harness.make_plan(run_dir, 1, [12])
    folder = checkpoint_folder.write(
        run_dir / "checkpoints", 3, run_model.read_run(run_dir)["recipe_hash"], writers_of({"x.json": {"a": 1}})
    )
    (folder / "x.json").write_text("{}")
    with pytest.raises(WorkerError):
        model_export.export(run_dir, 3)
    assert not list((run_dir).glob("exports/*"))
