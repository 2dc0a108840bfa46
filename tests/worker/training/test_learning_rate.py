"""The scaled learning rate of the recipe is the one that is trained with."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_it_is_trained_with(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe: dict[str, Any] = {
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
