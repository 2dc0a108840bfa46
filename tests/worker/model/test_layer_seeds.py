"""Each layer begins its own random numbers, where the recipe draws any; without dropout nothing of a pass changes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from homelab.shared.law import model_chance
from homelab.worker.model import build, inspection, layer_seeds
from tests.worker import harness
from tests.worker.model import tiny_models


def built(model: Path, run: Path, *, older: bool = False, **recipe: Any) -> Any:
    task = harness.task_of(run, model__name=str(model), method__kind="lora", **recipe)
    if older:
        del task.run[model_chance.DRAWS_KEY]
    made = build.load_model(task, str(model), lambda note: None).train()
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return made


def hooks(model: Any) -> int:
    return sum(len(layer._forward_pre_hooks) for layer in inspection.layers(model))


def gradients(model: Any, seed: int, *, backward_seed: int | None = None) -> torch.Tensor:
    tokens = torch.arange(1, 40).unsqueeze(0)
    model.zero_grad()
    layer_seeds.begin(seed)
    loss = model(input_ids=tokens, labels=tokens).loss
    layer_seeds.again(seed if backward_seed is None else backward_seed)
    torch.rand(7)  # other micro-batches come in between
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad])


def test_a_layer_draws_the_same_whatever_was_computed_before_it(model: Path, tmp_path: Path) -> None:
    """As in another stage, or when it is computed again alone."""
    layers = inspection.layers(built(model, tmp_path, method__dropout=0.3))
    assert len(layers) > 1
    heard: list[torch.Tensor] = []
    layers[1].register_forward_hook(lambda _layer, _inputs, _output: heard.append(torch.rand(3)))
    given = torch.ones(1, 4, layers[1].self_attn.q_proj.base_layer.in_features)
    angles = (torch.ones(1, 4, layers[1].self_attn.head_dim), torch.zeros(1, 4, layers[1].self_attn.head_dim))
    masks = []
    for before, seed in ((0, 8), (1, 8), (0, 9)):
        layer_seeds.begin(seed)
        for _ in range(before):
            layers[0](given, position_embeddings=angles)
        torch.rand(before)
        masks.append(layers[1](given, position_embeddings=angles))
    assert torch.equal(masks[0], masks[1]) and torch.equal(heard[0], heard[1])
    assert not torch.equal(masks[0], masks[2]), "another micro-batch"
    layer_seeds.begin(8)
    assert not torch.equal(layers[0](given, position_embeddings=angles), masks[0])
    one, other = (torch.rand(5) for number in (0, 1) if layer_seeds._begin_layer(number, False) is None)
    assert not torch.equal(one, other), "each layer has its own"


@pytest.mark.parametrize("model_dropout", [False, True])
def test_what_is_computed_again_draws_the_same(model: Path, tmp_path: Path, model_dropout: bool) -> None:
    plain, again = (
        built(model, tmp_path, method__dropout=0.3, method__model_dropout=model_dropout, train__gradient_checkpointing=is_on)
        for is_on in (False, True)
    )
    expected = gradients(plain, 5)
    assert torch.equal(gradients(again, 5), expected)
    assert not torch.allclose(gradients(again, 6), expected, rtol=1e-3)


def test_a_layer_around_which_another_program_checkpoints_needs_the_seed_of_its_own_micro_batch(model: Path, tmp_path: Path) -> None:
    """As transformers did until 5.17: the layer begins its numbers anew inside of what is computed again."""
    whole = built(model, tmp_path, method__dropout=0.3)
    expected = gradients(whole, 5)
    for layer in inspection.layers(whole):

        def whole_call(*given: Any, _layer: Any = layer, _forward: Any = layer.forward, **more: Any) -> Any:
            def inside(*inputs: Any) -> Any:
                for hook in _layer._forward_pre_hooks.values():
                    hook(_layer, inputs)
                return _forward(*inputs, **more)

            return checkpoint(inside, *given, use_reentrant=False)

        layer.forward = whole_call
    assert torch.equal(gradients(whole, 5), expected)
    assert not torch.allclose(gradients(whole, 5, backward_seed=6), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("recipe", "count"),
    [({}, 0), ({"method__dropout": 0.1}, 1), ({"method__dropout": 0.1, "older": True}, 0), ({"method__model_dropout": True}, 1)],
)
def test_only_a_recipe_that_draws_is_touched(model: Path, tmp_path: Path, recipe: dict[str, Any], count: int) -> None:
    made = built(model, tmp_path, **recipe)
    assert hooks(made) == count * len(inspection.layers(made))


def test_a_recipe_without_dropout_draws_nothing_in_a_pass(model: Path, tmp_path: Path) -> None:
    made = built(model, tmp_path)
    layer_seeds.begin(3)
    before = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    tokens = torch.arange(1, 40).unsqueeze(0)
    made(input_ids=tokens, labels=tokens).loss.backward()
    assert before == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("kind", sorted(tiny_models.CONFIGS))
def test_the_layers_of_each_family_are_found(kind: str) -> None:
    layers = inspection.layers(tiny_models.build(kind, "meta"))
    assert layers is not None and len(layers) == 2
