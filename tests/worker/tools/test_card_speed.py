"""A card is measured by the worker's own steps, on a model of random weights that is held as one from files would be."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from homelab.controller.features.bench import card_recipe
from homelab.shared.protocol.collective_stages import DONE, TRAINING
from homelab.shared.protocol.quantisation import NF4
from homelab.worker.errors import WorkerError
from homelab.worker.model import random_weights
from homelab.worker.model.build import load_base
from homelab.worker.tools import card_speed
from homelab.worker.tools.rank_state import StateFile

pytestmark = pytest.mark.timeout(120)
TINY: dict[str, Any] = card_recipe.CPU.shape.model_dump(exclude_none=True) | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}


@pytest.mark.parametrize("how", [None, NF4])
def test_random_weights_are_held_as_those_of_files(tmp_path: Path, how: str | None) -> None:
    folder = random_weights.folder(tmp_path / "model", TINY)
    model = load_base(str(folder), None, how, torch.float32, None, "here", random_weights.read)
    layer, norm = model.model.layers[0].mlp.up_proj, model.model.norm.weight
    assert type(layer).__name__ == ("Linear" if how is None else "Linear4bit") and torch.equal(norm, torch.ones_like(norm))
    assert 0.015 < model.lm_head.weight.std().item() < 0.025 and not any(parameter.is_meta for parameter in model.parameters())
    logits = model(input_ids=torch.arange(8).unsqueeze(0)).logits
    assert logits.isfinite().all() and logits.std() > 0


def asked(**changes: Any) -> dict[str, Any]:
    recipe = card_recipe.CPU
    row = recipe.row(kind="lora", precision="fp32")
    return {
        **recipe.request(row, "cpu"),
        "shape": TINY,
        "measure_s": 0.2,
        "train": {**recipe.request(row, "cpu")["train"], "seq_len": 32},
        **changes,
    }


def test_the_steps_of_the_workers_own_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "input.json").write_text(json.dumps(asked()))
    state = StateFile(tmp_path, 0)
    stages: list[str] = []
    monkeypatch.setattr(
        StateFile,
        "__call__",
        lambda self, stage=None, **more: (stages.append(stage or ""), self.known.update(more, stage=stage or self.known.get("stage")))[0],
    )
    card_speed.run(state)
    (result,) = state.known["results"]
    assert stages[-1] == DONE and TRAINING in stages and result["torch"] == torch.__version__
    assert result["steps"] >= card_speed.LEAST and result["tokens_per_s"] > 0 and result["peak_bytes"] > 0


def test_the_first_steps_do_not_count_and_a_slow_card_ends_after_few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = card_speed._Clock(StateFile(tmp_path, 0), "cpu", step_tokens=1000, measure_s=60.0)
    for seconds in [500.0] * card_speed.WARM + [20.0] * card_speed.LEAST:
        now[0] += seconds
        try:
            clock.step(None)
        except card_speed._Enough:
            break
    assert clock.steps == card_speed.WARM + card_speed.LEAST and clock.tokens_per_s == 50.0


def test_what_runs_out_of_memory_is_told_in_three_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    (tmp_path / "input.json").write_text(json.dumps(asked()))
    monkeypatch.setattr(card_speed, "_train", full)
    with pytest.raises(WorkerError, match="no room for the test model: CUDA out of memory") as refused:
        card_speed.run(StateFile(tmp_path, 0))
    assert "--method qlora" in refused.value.hint
