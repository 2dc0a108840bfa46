"""Models whose own files would decide a training: dropout in config.json, towers that a text does not reach. One rank and two have the same curve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.model import tiny_models

TOLERANCE = 3e-6
SHORT = {"train__steps": 3, "train__epochs": None}


def losses(
    forks: harness.Forks, place: Path, model: Path, data: Path, shares: list[int], strategy: str = "ddp", **recipe: Any
) -> dict[int, float]:
    run = harness.make_run(place, model, data, **{**SHORT, **recipe})
    forks.train(run, 1, shares, strategy=strategy)
    return harness.losses(run, 1)


def notes(run: Path) -> list[str]:
    return [line["message"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "note")]


@pytest.mark.parametrize(
    "kind", ["phi", pytest.param("gpt2", marks=pytest.mark.thorough), pytest.param("starcoder2", marks=pytest.mark.thorough)]
)
def test_dropout_of_the_model_itself_does_not_make_the_curve_depend_on_the_cluster(
    forks: harness.Forks, tmp_path: Path, data: Path, tokenizer: Any, kind: str
) -> None:
    model = tiny_models.folder(kind, tmp_path / "model", tokenizer)

    one = losses(forks, tmp_path / "one", model, data, [12], method__kind="lora")
    two = losses(forks, tmp_path / "two", model, data, [7, 5], method__kind="lora")

    assert two == pytest.approx(one, rel=TOLERANCE)
    assert any(note.startswith("model dropout: ") and note.endswith("does not depend on the cluster") for note in notes(tmp_path / "one"))


def test_dropout_that_the_recipe_keeps_is_said(forks: harness.Forks, tmp_path: Path, data: Path, tokenizer: Any) -> None:
    model = tiny_models.folder("phi", tmp_path / "model", tokenizer)

    off = losses(forks, tmp_path / "off", model, data, [12], method__kind="lora")
    kept = losses(forks, tmp_path / "kept", model, data, [12], method__kind="lora", method__model_dropout=True)

    assert kept != pytest.approx(off, rel=1e-4)
    assert any(note.startswith("law: attention_dropout = 0.1") for note in notes(tmp_path / "kept"))


@pytest.mark.parametrize(
    ("method", "strategies"),
    [
        ("full", ["ddp"]),
        pytest.param("full", ["zero2", "zero3"], marks=pytest.mark.thorough),
        pytest.param("lora", ["ddp", "zero2", "zero3"], marks=pytest.mark.thorough),
    ],
)
def test_a_model_that_also_sees_trains_its_language_alone(
    forks: harness.Forks, tmp_path: Path, data: Path, tokenizer: Any, method: str, strategies: list[str]
) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_models.folder("gemma3", tmp_path / "model", tokenizer)

    one = losses(forks, tmp_path / "one", model, data, [12], method__kind=method)

    for strategy in strategies:
        two = losses(forks, tmp_path / strategy, model, data, [7, 5], strategy, method__kind=method)
        assert two == pytest.approx(one, rel=TOLERANCE), strategy
        assert not any("vision" in name for name in harness.weights(tmp_path / strategy, 3))
        if method == "full":
            before, after = (
                dict(AutoModelForCausalLM.from_pretrained(place).named_parameters()) for place in (model, tmp_path / strategy / "final")
            )
            assert before.keys() == after.keys()
            assert all(after[name].equal(before[name]) for name in before if "vision" in name), "the tower is in the result as it was"


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("deepseek_v3", {"shares": [12, 0], "stages": [1, 1]}),
        *(
            pytest.param(kind, plan, marks=pytest.mark.thorough)
            for kind, plan in (
                ("deepseek_v3", {"shares": [7, 5], "strategy": "zero2"}),
                ("gemma4_text", {"shares": [12]}),
                ("gemma4_text", {"shares": [0, 12], "stages": [1, 1], "stage_order": [1, 0]}),
                ("gemma4_text", {"shares": [7, 5], "strategy": "zero3"}),
                ("lfm2_moe", {"shares": [7, 5]}),
            )
        ),
    ],
)
def test_the_result_has_what_is_no_weight_of_its_base(
    kind: str, plan: dict[str, Any], forks: harness.Forks, tmp_path: Path, data: Path, tokenizer: Any
) -> None:
    """The scale of a layer and the biases of a router stand in no optimizer and no gradient, and the model is another one without them."""
    import torch
    from safetensors.torch import load_file

    from homelab.worker.checkpoints.weights import buffers
    from homelab.worker.model.build import load_base
    from homelab.worker.tools import chat

    model = tiny_models.folder_with_buffers(kind, tmp_path / "model", tokenizer)
    recipe: dict[str, Any] = {**SHORT, "method__kind": "full"}
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    forks.train(run, 1, plan.pop("shares"), **plan)

    base, final = (load_base(str(place), None, None, torch.float32, None, "") for place in (model, run / "final"))
    assert buffers(base) and all(buffers(final)[name].equal(buffer) for name, buffer in buffers(base).items())
    trained = chat.load(json.loads((run / "run.json").read_text()), run, str(model), run / "checkpoints" / "step-00000003", None)
    tokens = torch.arange(3, 20).view(1, -1)
    with torch.no_grad():
        assert final.eval()(input_ids=tokens).logits.equal(trained.eval()(input_ids=tokens).logits)
    assert load_file(model / "model.safetensors").keys() == load_file(run / "final" / "model.safetensors").keys()
