"""A head with one number in the place of the head for words: what a reward model says of an answer (Stiennon et al. 2020, section 3.4).

The result has the form that transformers gives a model for sequence classification with one label, so that TRL and transformers load it: the head's name is
`score`, and an answer's number stands at its last token (transformers/modeling_layers.py, GenericForSequenceClassification; trl/trainer/reward_trainer.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection

_HEAD, _SCORE = "lm_head.weight", "score.weight"
_DEVIATION = 0.02  # transformers' initializer_range, where a configuration has none


class ScoreHead(torch.nn.Linear):
    """[..., hidden] -> [..., 1] in fp32, whatever the model computes in: leads of hundredths decide."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.nn.functional.linear(hidden.float(), self.weight.float())


def put_on(model: Any, seed: int, targets: Any, note: Callable[[str], None]) -> None:
    """Exchange the head of a causal LM, on the rank that computes the loss. Its start depends on the seed alone. `targets`: of the adapters. Raises
    WorkerError for a model that has no such form in transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as FORMS

    settings = model.config.get_text_config()
    head = getattr(model, "lm_head", None)
    if isinstance(targets, tuple | list) and "lm_head" in targets:
        raise WorkerError(
            "a reward model has no head for words, which the adapters should be put on", where="[method] targets in the recipe",
            hint="leave lm_head out: the head for scores is trained completely", needs_launch=True,
        )  # fmt: skip
    if model.config.model_type not in FORMS or model.base_model is model or not isinstance(head, torch.nn.Module):
        raise WorkerError(
            f"transformers has no {model.config.model_type} that scores answers", where='[objective] kind = "reward"',
            hint='take another model, as of the families Llama, Qwen, Gemma, Mistral; or [objective] kind = "dpo"', needs_launch=True,
        )  # fmt: skip
    weight = next(model.parameters())  # on the last stage of a pipeline no head was loaded
    digest = hashlib.sha256(f"homelab score {seed}".encode()).digest()
    drawn = torch.empty(1, settings.hidden_size).normal_(
        std=getattr(settings, "initializer_range", None) or _DEVIATION,
        generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")),
    )
    own = ScoreHead(settings.hidden_size, 1, bias=False, device=weight.device, dtype=torch.float32)
    with torch.no_grad():
        own.weight.copy_(drawn)
    model.lm_head = own
    for config in {id(each): each for each in (model.config, settings)}.values():
        config.tie_word_embeddings = False  # the embeddings are no head any more
    note("head: one number for an answer, in the place of the head for words")


def train(model: Any) -> None:
    """Let the head learn beside adapters, which freeze all of their base."""
    inspection.base_of(model).lm_head.requires_grad_(True)


def named(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names of a model for sequence classification."""
    return {name.removesuffix(_HEAD) + _SCORE if name.endswith(_HEAD) else name: tensor for name, tensor in tensors.items()}


def describe(folder: Path, model: Any, pad: int | None) -> None:
    """Let the files of a saved model, or of its adapter, say what it is. `pad`: the token of padding, by which transformers finds the last token of an answer."""
    adapter, config = folder / "adapter_config.json", folder / "config.json"
    if adapter.exists():
        content = json.loads(adapter.read_text(encoding="utf-8")) | {"task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        adapter.write_text(json.dumps(content, indent=2, sort_keys=True), encoding="utf-8")
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as FORMS

    content = json.loads(config.read_text(encoding="utf-8"))
    of_one = {
        "architectures": [FORMS[model.config.model_type]],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": pad,
    }
    config.write_text(json.dumps(content | of_one, indent=2, sort_keys=True), encoding="utf-8")
