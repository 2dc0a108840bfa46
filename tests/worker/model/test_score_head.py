"""The head of a reward model: what it refuses, and that its start depends on the seed alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from homelab.worker.errors import WorkerError
from homelab.worker.model import score_head
from homelab.worker.model.build import load_base


def test_the_start_depends_on_the_seed_alone(model: Path) -> None:
    heads = []
    for seed, before in ((1, 5), (1, 6), (2, 5)):
        torch.manual_seed(before)
        base = load_base(str(model), None, None, torch.float32, None, "")
        score_head.put_on(base, seed, "all-linear", lambda note: None)
        assert not base.config.tie_word_embeddings and base.get_output_embeddings().weight.shape == (1, base.config.hidden_size)
        heads.append(base.lm_head.weight.detach())
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_scores_are_full_numbers_in_a_model_of_sixteen_bits() -> None:
    head = score_head.ScoreHead(8, 1, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head(torch.ones(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_head_that_is_not_there_gets_no_adapter(model: Path) -> None:
    with pytest.raises(WorkerError) as error:
        score_head.put_on(load_base(str(model), None, None, torch.float32, None, ""), 1, ("q_proj", "lm_head"), lambda note: None)
    assert "leave lm_head out" in error.value.hint


def test_a_family_without_such_a_form_is_refused(model: Path) -> None:
    base = load_base(str(model), None, None, torch.float32, None, "")
    base.config.model_type = "granite"  # transformers has no GraniteForSequenceClassification
    with pytest.raises(WorkerError) as error:
        score_head.put_on(base, 1, "all-linear", lambda note: None)
    assert "no granite that scores answers" in error.value.message and "dpo" in error.value.hint
