"""What adapters start from, and what they reach."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch

from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection, pretrained, unsloth
from homelab.worker.model.build import add_adapters
from homelab.worker.model.trained_weights import freeze_unreached
from tests.worker import harness
from tests.worker.model import tiny_models


def adapted(kind: str, targets: Any, *, seed: int = 42, chance: int = 0) -> Any:
    model = tiny_models.build(kind)
    torch.manual_seed(chance)
    return add_adapters(model, Method("lora", rank=2, alpha=4, targets=targets), seed)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma3"])
@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "wte", "q_proj", "c_attn"], ["lm_head", "o_proj", "c_proj"]])
def test_every_adapter_starts_from_the_seed_alone(kind: str, targets: Any):
    first, again, other = adapted(kind, targets, chance=1), adapted(kind, targets, chance=2), adapted(kind, targets, seed=43, chance=1)

    starts = [{name: weight for name, weight in model.named_parameters() if weight.requires_grad} for model in (first, again, other)]
    assert starts[0].keys() == starts[1].keys()
    assert all(starts[0][name].equal(starts[1][name]) for name in starts[0])
    drawn = [name for name, weight in starts[0].items() if weight.any()]
    assert drawn and not any(starts[0][name].equal(starts[2][name]) for name in drawn), "another seed, another start"
    if "embed_tokens" in targets:
        assert any("lora_embedding_B" in name for name in drawn)


def test_unsloths_adapters_start_as_those_of_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What Unsloth itself does with them is tried in its own environment (test_unsloth.py); here PEFT stands for it, with a chance of its own."""

    def get_peft_model(model: Any, *, r: int, lora_alpha: int, target_modules: list[str], **_others: Any) -> Any:
        return peft.get_peft_model(model, peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=target_modules, task_type="CAUSAL_LM"))

    of_unsloth = SimpleNamespace(from_pretrained=lambda path, **options: (tiny_models.build("llama"), None), get_peft_model=get_peft_model)
    monkeypatch.setitem(sys.modules, "unsloth", SimpleNamespace(FastLanguageModel=of_unsloth))
    monkeypatch.setattr(pretrained, "from_pretrained", lambda auto, path, **options: auto.from_pretrained(path, **options))
    task = harness.task_of(tmp_path, method__kind="lora", method__rank=2, method__alpha=4, method__backend="unsloth", train__seed=42)

    theirs, ours = (dict(model.named_parameters()) for model in (unsloth.load(task, "/here", print), adapted("llama", "all-linear")))

    assert theirs.keys() == ours.keys() and all(weight.equal(theirs[name]) for name, weight in ours.items() if weight.requires_grad)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "fc1"]])
def test_adapters_lie_in_the_language_model_alone(targets: Any):
    model = adapted("gemma3", targets)

    found = inspection.inspect(model)

    assert found.adapted and all(name.startswith("model.language_model.") for name in found.adapted)
    assert found.no_gradient == ()


def test_targets_in_a_tower_alone_are_refused():
    with pytest.raises(WorkerError, match="do not fit"):
        adapted("gemma3", ["fc1"])


@pytest.mark.parametrize("kind", ["gemma3", "llama"])
def test_what_gets_no_gradient_is_frozen_and_named(kind: str):
    model, notes = tiny_models.build(kind), []
    if kind == "llama":
        model.model.unused_head = torch.nn.Linear(32, 32)

    freeze_unreached(model, notes.append)

    (note,) = notes
    assert re.match("frozen: .*(vision_tower|unused_head).*: a training on text gives them no gradient", note)
    tokens = torch.arange(1, 9).unsqueeze(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert all((weight.grad is not None) == weight.requires_grad for weight in model.parameters())
