"""Every optimizer that a recipe may name: a pipeline saves its state as one process would have it, and goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from homelab.shared.recipe import Train
from homelab.worker.strategies.pipeline import stages_state
from tests.worker import harness
from tests.worker.training.test_exactness import COMMON

OPTIMIZERS = get_args(get_type_hints(Train)["optimizer"])


def stepped(name: str) -> tuple[Any, list[torch.nn.Parameter]]:
    """An optimizer after two steps; the state of its first parameter is large enough for 8 bits."""
    import bitsandbytes

    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(64, 128)), torch.nn.Parameter(torch.randn(8))]
    kinds = {"adamw": torch.optim.AdamW, "adamw_8bit": bitsandbytes.optim.AdamW8bit, "paged_adamw_8bit": bitsandbytes.optim.PagedAdamW8bit}
    optimizer = kinds[name](parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer, parameters


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_comes_back_as_it_was(name: str) -> None:
    saved = stepped(name)[0].state_dict()["state"]

    tensors, kinds = stages_state.flat(saved)
    back = stages_state.nested(tensors, kinds)

    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert str(back) == str(saved) and back.keys() == saved.keys()
    assert all(one.equal(other) for one, other in zip(tensors.values(), stages_state.flat(back)[0].values(), strict=True))


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_a_state_that_was_taken_apart(name: str) -> None:
    from homelab.worker.checkpoints import optimizer_state

    first, parameters = stepped(name)
    whole = first.state_dict()
    fresh, others = stepped(name)
    with torch.no_grad():
        for one, other in zip(parameters, others, strict=True):
            other.copy_(one)
    optimizer_state.load_own(fresh, {**whole, "state": stages_state.nested(*stages_state.flat(whole["state"]))}, torch.device("cpu"))
    for optimizer, own in ((first, parameters), (fresh, others)):
        torch.manual_seed(5)
        for parameter in own:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()

    assert all(one.equal(other) for one, other in zip(parameters, others, strict=True))


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OPTIMIZERS[1:])
def test_a_pipeline_goes_on_with_eight_bit_states(name: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe = COMMON | {
        "method__kind": "lora",
        "method__rank": 64,
        "train__optimizer": name,
        "train__steps": 4,
        "checkpoint__every_steps": 2,
    }
    one = harness.make_run(tmp_path / "one", model, data, **recipe)
    forks.train(one, 1, [12])
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    forks.train(run, 1, [12, 0], stages=[1, 1], timeout_s=150)
    again = harness.make_run(tmp_path / "again", model, data, **recipe)
    (again / "checkpoints").symlink_to(run / "checkpoints")
    forks.train(again, 1, [12, 0], stages=[1, 1], resume_step=2, timeout_s=150)

    expected = harness.losses(one, 1)
    assert harness.losses(run, 1) == pytest.approx(expected, rel=1e-5)
    assert harness.losses(again, 1) == pytest.approx({step: expected[step] for step in (3, 4)}, rel=1e-5)
