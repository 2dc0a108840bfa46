"""Embeddings that are the head too are on the first stage and on the last, frozen; and what one node has wrong ends the attempt with one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import AFTER_ALL, COMMON

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose head is its table of embeddings."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = harness.tiny_llama(tmp_path_factory.mktemp("tied") / "model", hidden=32, intermediate=64, layers=4)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    return folder


def test_lora_on_two_stages_has_the_curve_of_one_process(tied: Path, data: Path, forks: harness.Forks, tmp_path: Path) -> None:
    recipe = COMMON | {"method__kind": "lora", "train__steps": 8, "checkpoint__every_steps": 8}
    one, two = (harness.make_run(tmp_path / name, tied, data, **recipe) for name in ("one", "two"))
    forks.train(one, 1, [12], micro_batch=5)
    forks.train(two, 1, [12, 0], stages=[3, 1])
    assert harness.losses(two, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    assert harness.relative_error(harness.weights(two, 8), harness.weights(one, 8)) < AFTER_ALL


def test_a_model_with_other_layers_than_the_plan_ends_every_rank_with_one_message(
    tied: Path, data: Path, forks: harness.Forks, tmp_path: Path
) -> None:
    run = harness.make_run(tmp_path / "run", tied, data, method__kind="lora")
    codes, output = forks.run(run, 1, [12, 0], stages=[3, 2])
    assert codes == [2, 2] and "Traceback" not in output, output
    for rank in (0, 1):
        error = harness.error_of(run, 1, rank)
        assert (
            error["message"] == "the plan divides 5 layers, but the model has 4"
            and error["where"] == "[model] name in the recipe"
            and error["hint"]
        )
