"""The learning rate that the recipe scales: the formula, the plan's words for it, and the rate that is trained with."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from homelab.worker.learning_rate import scaled
from tests.checks import healthy
from tests.planning.test_plan import make, why
from tests.worker import harness


def test_linear_root_or_not_at_all() -> None:
    assert scaled(1e-3, "none", 96, None) == 1e-3
    assert scaled(1e-3, "linear", 96, 24) == pytest.approx(4e-3)
    assert scaled(1e-3, "sqrt", 96, 24) == pytest.approx(2e-3)
    assert scaled(1e-3, "linear", 6, 24) == pytest.approx(2.5e-4), "a smaller batch gets a lower rate"
    assert scaled(1e-3, "sqrt", 24, 24) == 1e-3


def test_the_plan_says_what_it_comes_to() -> None:
    train = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3}
    assert not [choice for choice in make(healthy.cpu()).choices if choice.subject == "learning rate"]
    value, because = why(
        make(healthy.cpu(), healthy.recipe(train={**train, "lr_scale": "linear", "reference_batch": 8})),
        "learning rate",
    )
    assert value == "0.0015" and because.startswith("0.001 x 12 / 8") and "linear" in because
    value, because = why(
        make(healthy.cpu(), healthy.recipe(train={**train, "lr_scale": "sqrt", "reference_batch": 48})), "learning rate"
    )
    assert value == "0.0005" and because.startswith("0.001 x sqrt(12 / 48)")


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_it_is_trained_with(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe = {
        "train__steps": 2,
        "train__epochs": None,
        "train__warmup_steps": 0,
        "train__schedule": "constant",
        "train__learning_rate": 1e-3,
    }
    run = harness.make_run(tmp_path / "run", model, data, **recipe, train__lr_scale="sqrt", train__reference_batch=6)
    forks.train(run, 1, [12])
    rates = [line["learning_rate"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "train")]
    assert rates == pytest.approx([1e-3 * math.sqrt(2)] * 2)
