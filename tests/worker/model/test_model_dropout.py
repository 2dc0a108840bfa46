"""The chance in a model's own modules is off, or kept and said, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection, model_dropout
from homelab.worker.model.pretrained import LoadedPart
from tests.worker import harness
from tests.worker.model import tiny_models


def settled(kind: str, tmp_path: Path, *, nodes: int = 1, stage: bool = False, **recipe: Any) -> tuple[Any, list[str]]:
    plan = {"ranks": [{"rank": rank, "node": str(rank), "share": 12} for rank in range(nodes)]}
    task = harness.task_of(tmp_path, [str(rank) for rank in range(nodes)], plan=plan, **recipe)
    notes: list[str] = []
    noise: dict[str, Any] = {"router_jitter_noise": 0.4} if kind == "phimoe" else {}
    model = tiny_models.build(kind, **noise)
    model_dropout.settle(model, task, notes.append, LoadedPart(is_stage=stage))
    return model, notes


@pytest.mark.parametrize("kind", sorted({*tiny_models.DRAWING} - {"phimoe"}))
def test_every_source_is_off_and_named(tmp_path: Path, kind: str):
    before = tiny_models.build(kind)
    model, notes = settled(kind, tmp_path, nodes=2)

    assert inspection.draws(before) is True and inspection.draws(model) is False
    (note,) = notes
    rates = {
        key for key, value in tiny_models.CONFIGS[kind].items() if isinstance(value, float) and value and ("drop" in key or "jitter" in key)
    }
    assert note.startswith("model dropout: ") and any(key in note for key in rates)
    tokens = torch.arange(1, 9).unsqueeze(0)
    assert torch.equal(before.eval()(input_ids=tokens).logits, model.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "cohere"])
def test_a_model_without_chance_needs_no_word(tmp_path: Path, kind: str):
    assert settled(kind, tmp_path)[1] == []


@pytest.mark.parametrize("kind", ["phi", "gpt2", "starcoder2", "falcon", "mixtral"])
def test_what_the_recipe_keeps_is_a_law_line(tmp_path: Path, kind: str):
    model, (note,) = settled(kind, tmp_path, method__model_dropout=True)

    assert inspection.draws(model) is True
    assert note.startswith("law: ") and " = 0." in note


@pytest.mark.parametrize(("kind", "keep"), [("phi", True), ("gpt2", True), ("phimoe", False)])
def test_stages_refuse_chance(tmp_path: Path, kind: str, keep: bool):
    with pytest.raises(WorkerError, match="different numbers from one process") as caught:
        settled(kind, tmp_path, stage=True, method__model_dropout=keep)
    assert ("model_dropout" in caught.value.hint) == keep


def test_a_stage_keeps_the_chance_of_its_layers(tmp_path: Path):
    task = harness.task_of(tmp_path, ["0", "1"], method__model_dropout=True)
    model, notes = tiny_models.build("llama", attention_dropout=0.1), []
    model_dropout.settle(model, task, notes.append, LoadedPart(is_stage=True))
    assert inspection.draws(model) is True
    assert notes == ["law: attention_dropout = 0.1: random numbers depend on the rows of a micro-batch"]


def test_ranks_that_leave_out_layers_are_refused(tmp_path: Path):
    with pytest.raises(WorkerError, match=r"layerdrop = 0\.3"):
        settled("opt", tmp_path, nodes=2, method__model_dropout=True)


def test_a_rate_on_which_the_answers_depend_stays_and_is_said(tmp_path: Path):
    model, notes = settled("phimoe", tmp_path)

    assert [source.amount for source in inspection.chance(model)], "its router compares with this number in every pass"
    assert any(note.startswith("law: ") for note in notes)
