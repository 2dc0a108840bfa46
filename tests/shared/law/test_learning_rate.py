"""The learning rate that the recipe scales: the formula, the plan's words for it, and the rate that is trained with."""

from __future__ import annotations

import pytest

from homelab.shared.law.learning_rate import scaled
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make, why


def test_linear_root_or_not_at_all() -> None:
    assert scaled(1e-3, "none", 96, None) == 1e-3
    assert scaled(1e-3, "linear", 96, 24) == pytest.approx(4e-3)
    assert scaled(1e-3, "sqrt", 96, 24) == pytest.approx(2e-3)
    assert scaled(1e-3, "linear", 6, 24) == pytest.approx(2.5e-4), "a smaller batch gets a lower rate"
    assert scaled(1e-3, "sqrt", 24, 24) == 1e-3


def test_the_plan_says_what_it_comes_to() -> None:
    train = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3}
    assert not [choice for choice in make(healthy.cpu()).choices if choice.subject == "learning rate"]
    value, because = why(make(healthy.cpu(), healthy.recipe(train={**train, "lr_scale": "linear", "reference_batch": 8})), "learning rate")
    assert value == "0.0015" and because.startswith("0.001 x 12 / 8") and "linear" in because
    value, because = why(make(healthy.cpu(), healthy.recipe(train={**train, "lr_scale": "sqrt", "reference_batch": 48})), "learning rate")
    assert value == "0.0005" and because.startswith("0.001 x sqrt(12 / 48)")
