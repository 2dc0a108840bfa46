"""What a built model has that may decide a training beside the recipe."""

from __future__ import annotations

import random

import pytest
import torch

from homelab.worker.model import inspection
from tests.worker.model import tiny_models


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", tiny_models.CONFIGS)
def test_sources_of_chance_are_those_of_the_config(kind: str, device: str):
    rates = {
        value
        for key, value in tiny_models.CONFIGS[kind].items()
        if isinstance(value, float) and value > 0 and any(word in key for word in ("drop", "jitter"))
    }

    assert {found.amount for found in inspection.chance(tiny_models.build(kind, device))} == rates


@pytest.mark.parametrize("kind", sorted({*tiny_models.CONFIGS} - {"phimoe"}))
def test_a_model_draws_exactly_where_a_source_is_named(kind: str):
    model = tiny_models.build(kind)
    assert inspection.draws(model) == bool(inspection.chance(model))

    for _, _, set_rate in list(inspection.sources(model)):
        set_rate(0.0)

    assert inspection.draws(model) is False, "every source is named and can be set to 0"
    assert not inspection.chance(model)


def test_chance_without_a_rate_is_found_by_what_a_pass_draws():
    model = tiny_models.build("phimoe")  # its router draws noise in training (modeling_phimoe.py, sparsemixer)
    for _, _, set_rate in list(inspection.sources(model)):
        set_rate(0.0)

    assert inspection.draws(model) is True


@pytest.mark.parametrize("stream", ["torch", "python", "numpy"])
def test_every_generator_counts_and_is_put_back(stream: str):
    import numpy

    model = tiny_models.build("llama")
    draw = {"torch": lambda: torch.rand(1), "python": random.random, "numpy": lambda: numpy.random.rand()}[stream]
    hook = model.model.layers[0].register_forward_hook(lambda *_: draw() and None)
    next_number = {"torch": lambda: float(torch.rand(1)), "python": random.random, "numpy": lambda: float(numpy.random.rand())}[stream]
    torch.manual_seed(7), random.seed(7), numpy.random.seed(7)
    expected = next_number()
    torch.manual_seed(7), random.seed(7), numpy.random.seed(7)

    assert inspection.draws(model) is True
    assert next_number() == expected
    hook.remove()
    assert inspection.draws(model) is False


def test_adapters_draw_for_themselves():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_models.build("llama"), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.25))

    assert [(found.amount, found.count, found.is_adapter) for found in inspection.chance(model)] == [(0.25, 2, True)]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("adapters", [None, "all-linear"])
def test_towers_get_no_gradient_from_a_text(adapters: str | None, device: str):
    model = tiny_models.build("gemma3", device, adapters=adapters)

    found = inspection.inspect(model).no_gradient

    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert found and set(found) == {name for name in trained if "vision_tower" in name or "projector" in name}
    assert inspection.outside_language(model) == ("model.vision_tower", "model.multi_modal_projector")
    assert inspection.chance(model) == (), "a text meets no dropout of the tower"


@pytest.mark.parametrize("kind", sorted({*tiny_models.CONFIGS} - {"gemma3"}))
def test_a_model_of_text_alone_gets_a_gradient_everywhere(kind: str):
    assert inspection.inspect(tiny_models.build(kind)).no_gradient == ()


def test_a_part_that_the_text_model_does_not_compute_is_found_by_its_graph():
    model = tiny_models.build("llama")
    model.model.unused = torch.nn.Linear(32, 32)

    assert inspection.without_gradient(model) == ("model.unused.weight", "model.unused.bias")


def test_tied_weights_and_what_the_adapters_reach():
    model = tiny_models.build("llama", "meta", adapters=["q_proj", "down_proj"], tie_word_embeddings=True)

    found = inspection.inspect(model)

    assert found.tied == (("base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"),)
    assert found.adapted == {"model.layers.*.mlp.down_proj": 2, "model.layers.*.self_attn.q_proj": 2}
    assert found.trained == 2 * 2 * 2 * (32 + 32)


@pytest.mark.parametrize("adapters", [None, ["q_proj"]])
def test_a_text_takes_no_place_in_a_picture(adapters: list[str] | None):
    from homelab.worker.model import row_limits

    assert row_limits.of(tiny_models.build("gemma3", adapters=adapters)).positions is None
