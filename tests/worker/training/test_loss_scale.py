"""The loss scale of fp16 follows torch's rules, by the norm of the whole gradient."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.worker.training import loss_scale


def optimizer_with(*gradients: list[float]) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(len(gradient))) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return torch.optim.SGD(parameters, lr=1.0)


@settings(deadline=None)
@given(finite=st.lists(st.booleans(), max_size=40), first=st.sampled_from([2.0**16, 2.0**126, 2.0**-3]))
def test_it_grows_and_falls_as_torchs_does(finite: list[bool], first: float) -> None:
    theirs, ours = torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3), loss_scale.LossScale()
    ours.load_state_dict(theirs.state_dict())
    for is_finite in finite:
        theirs.scale(torch.ones(()))
        theirs_stepped, ours_stepped = optimizer_with([0.0 if is_finite else math.inf]), optimizer_with([0.0 if is_finite else math.inf])
        theirs.unscale_(theirs_stepped)
        theirs.step(theirs_stepped)
        theirs.update()
        assert ours.judge(0.0 if is_finite else math.inf) is is_finite
        ours.step(ours_stepped)
        ours.update()
        assert ours.state_dict() == theirs.state_dict(), "a checkpoint of either goes on with the other"


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 40_000.0, -40_000.0])
def test_an_element_beyond_the_limit_makes_the_whole_gradient_infinite(odd: float) -> None:
    """Also one of a finite sum of parts, each of which fp16 has: with the same rows in one pass it would be infinite."""
    scale = loss_scale.LossScale()
    optimizer = optimizer_with([1.0, 2.0], [], [0.5, odd])
    scale.unscale_(optimizer)
    norm = float(torch.stack([parameter.grad.norm() for parameter in optimizer.param_groups[0]["params"]]).norm())
    assert not scale.judge(norm)
    scale.step(optimizer)
    assert all(not parameter.any() for parameter in optimizer.param_groups[0]["params"]), "skipped"


def test_gradients_are_divided_by_the_scale_and_stepped() -> None:
    scale = loss_scale.LossScale()
    optimizer = optimizer_with([32768.0, -2.0], [])
    scale.unscale_(optimizer)
    assert scale.judge(1.0)
    scale.step(optimizer)
    assert optimizer.param_groups[0]["params"][0].tolist() == [-0.5, 2.0**-15]


def test_a_rank_without_gradients_has_nothing_to_divide() -> None:
    loss_scale.LossScale().unscale_(optimizer_with([]))


def test_a_loss_in_sixteen_bits_is_scaled_in_thirty_two() -> None:
    assert float(loss_scale.LossScale().scale(torch.tensor(3.0, dtype=torch.float16))) == 3 * 2.0**16
