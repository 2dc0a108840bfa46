"""Adapters on embeddings and head, of which the first stage and the last one have one each: the training is that of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.checkpoints.tensor_files import names_in
from homelab.worker.model import inspection
from tests.worker import harness
from tests.worker.strategies.test_streamed import of
from tests.worker.training.test_exactness import COMMON, LENGTH, SHORT, assert_every_sample_once_per_epoch, assert_the_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LAYERS = 6
BOTH = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
THREE: dict[str, Any] = {"shares": [0, 12, 0], "stages": [2, 1, 3], "stage_order": [1, 0, 2], "micro_batch": 2}
TWO: dict[str, Any] = {"shares": [12, 0], "stages": [5, 1], "micro_batch": 5}


def saved(folder: Path, *, is_tied: bool) -> Path:
    """A small Llama, whose head is its table or not."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    harness.tiny_llama(folder, hidden=64, intermediate=96, layers=LAYERS)
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = is_tied
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


CASES: dict[str, tuple[bool, str, list[str], dict[str, Any], dict[str, Any]]] = {
    "lora on both, 3": (False, "lora", BOTH, THREE, {}),
    "qlora on both, 2, fused loss": (False, "qlora", BOTH, TWO, {"train__fused_loss": True}),
    "lora on the table, 3, with dropout": (False, "lora", ["v_proj", "embed_tokens"], THREE, {"method__dropout": 0.2}),
    "lora on the head, 3, with dropout": (False, "lora", ["v_proj", "lm_head"], THREE, {"method__dropout": 0.2}),
    "lora on the table that is the head, 3": (True, "lora", ["o_proj", "embed_tokens"], THREE, {}),
    "lora on the head that is the table, 3": (True, "lora", ["o_proj", "lm_head"], THREE, {}),
    "qlora on both that are one, 2": (True, "qlora", BOTH, TWO, {}),
    "lora on both, 3, layers from the hosts": (False, "lora", BOTH, THREE | {"streaming": [None, of(2), of(3, 1, 1)]}, {"train__gradient_checkpointing": True}),
    "dpo on both, 3": (False, "lora", BOTH, THREE, {"objective__kind": "dpo"}),
}  # fmt: skip
QUICK = ("lora on both, 3",)


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES])
def test_the_training_is_that_of_one_process(name: str, forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    is_tied, kind, targets, plan, changes = CASES[name]
    model, rows = saved(tmp_path / "model", is_tied=is_tied), data
    if "objective__kind" in changes:
        from tests.worker.training.test_preferences import pairs

        rows = harness.write_jsonl(tmp_path / "pairs.jsonl", pairs(44))
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": kind, "method__targets": targets} | changes
    one, run = (harness.make_run(tmp_path / who, model, rows, **recipe) for who in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=3 if not changes.get("method__dropout") else plan["micro_batch"])
    said = forks.train(run, 1, timeout_s=150, **plan)
    assert ("merge: head and embeddings become two tensors" in said) == is_tied, "also the stage with the table alone knows what it is"
    assert_the_same(run, one, {1: (1, len(plan["stages"]))}, SHORT)
    assert_every_sample_once_per_epoch(run, len(plan["stages"]), SHORT)
    ends = {end for end in ("embed_tokens", "lm_head") if any(f".{end}.lora" in name for name in harness.weights(run, SHORT))}
    assert ends == set(targets) & {"embed_tokens", "lm_head"}
    assert harness.adapter_settings(run) == harness.adapter_settings(one)
    assert names_in(run / "final" / "adapter_model.safetensors") == names_in(one / "final" / "adapter_model.safetensors")
    shutil.rmtree(run / "checkpoints")


@pytest.mark.thorough
def test_killed_and_gone_on_with_another_cut_and_another_strategy(forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "lora", "method__targets": BOTH}
    model = saved(tmp_path / "model", is_tied=False)
    one, run = (harness.make_run(tmp_path / who, model, data, **recipe) for who in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=3)
    forks.killed(run, 1, rank=1, step=2, timeout_s=150, **THREE)
    kept = max(int(path.name[5:]) for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    begin = min(kept, 2)
    forks.train(run, 2, resume_step=begin, timeout_s=150, **TWO)
    forks.train(run, 3, [7, 5], micro_batch=2, resume_step=4)
    forks.train(run, 4, resume_step=5, timeout_s=150, **THREE)
    assert_the_same(run, one, {2: (begin + 1, 2), 3: (5, 2), 4: (6, 3)}, SHORT)


@pytest.mark.thorough
def test_an_adapter_at_the_wrong_end_is_seen(forks: harness.Forks, tmp_path: Path, data: Path) -> None:
    """The last stage holds a table that is the head, too: an adapter on that copy learns nothing, and must not be the one that is saved."""
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "lora", "method__targets": ["o_proj", "embed_tokens"]}
    model = saved(tmp_path / "model", is_tied=True)
    one, run = (harness.make_run(tmp_path / who, model, data, **recipe) for who in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=5)
    forks.run(run, 1, entry=f"{__name__}:everywhere", timeout_s=150, **TWO)
    assert harness.relative_error(harness.weights(run, SHORT), harness.weights(one, SHORT)) > 1e-2


def everywhere() -> int:
    """A worker whose stages take each end for their own, where they have its weights."""
    from homelab.worker.strategies.pipeline import stage_model
    from homelab.worker.training.train import main

    cut = stage_model.cut

    def forgetful(model: Any, stage: Any, *about: Any, **more: Any) -> None:
        cut(model, stage, *about, **more)
        if stage.is_last:
            setattr(model, inspection.ENDS_ELSEWHERE, [])

    stage_model.cut = forgetful
    return main()
