"""The gradient's length: as torch measures it, but the same bits in whatever order a card adds up."""

from __future__ import annotations

import math

import pytest
import torch

from homelab.worker.strategies import gradient_norm

pytestmark = pytest.mark.timeout(30)


def parameters(seed: int, *, size: float = 1.0) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    made = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((300, 257), ((1 << 20) + 1,), (1,), (7, 3, 2))]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=draw) * size
    return [*made, torch.nn.Parameter(torch.zeros(3))]  # one that took no part


def gradients(made: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in made if parameter.grad is not None]


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_it_clips_as_torch_does(most: float) -> None:
    ours, theirs = parameters(1), parameters(1)
    found = gradient_norm.clip(gradients(ours), most)
    assert found == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, most)), rel=1e-4), "torch adds up a million numbers in fp32"
    exact = sum(float(gradient.double().square().sum()) for gradient in gradients(parameters(1))) ** 0.5
    assert found == pytest.approx(exact, rel=6e-8)
    for mine, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=0.0)
    assert gradient_norm.clip(gradients(ours), 1e6) == pytest.approx(min(most, found), rel=1e-5)


def test_the_order_in_which_a_card_adds_up_changes_no_bit() -> None:
    in_fp32 = 0
    for seed in range(10):
        straight, shuffled = parameters(seed, size=1e-3), parameters(seed, size=1e-3)
        for parameter in shuffled[:-1]:
            assert parameter.grad is not None
            order = torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(seed))
            parameter.grad = parameter.grad.flatten()[order].view(parameter.shape)
        norms = [float(torch.nn.utils.get_total_norm(gradients(made))) for made in (straight, shuffled)]
        in_fp32 += norms[0] != norms[1]
        assert gradient_norm.clip(gradients(straight), 0.5) == gradient_norm.clip(gradients(shuffled), 0.5)
    assert in_fp32, "in fp32 it does, or this test shows nothing"


def test_what_is_not_a_number_is_said_and_nothing_is_zero() -> None:
    made = parameters(2)
    assert made[0].grad is not None
    made[0].grad[3, 4] = math.inf
    assert math.isinf(gradient_norm.clip(gradients(made), 1.0))
    made[0].grad[3, 4] = math.nan
    assert math.isnan(gradient_norm.clip(gradients(made), 1.0))
    assert gradient_norm.clip([], 1.0) == 0.0


def test_a_copy_is_scaled_and_counted_elsewhere() -> None:
    counted, copy = torch.full((4,), 3.0), torch.full((2,), 8.0)
    assert gradient_norm.clip([counted], 1.0, lambda square: square + 64.0, [copy]) == 10.0
    assert torch.allclose(counted, torch.full((4,), 0.3)) and torch.allclose(copy, torch.full((2,), 0.8))
