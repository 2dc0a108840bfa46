"""What a recovery leaves as it was, whichever nodes are left."""

from __future__ import annotations

import pytest

from homelab.controller.run.fingerprint import as_begun
from homelab.shared.protocol.message import as_json
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make


@pytest.mark.parametrize("asked", ["auto", "bf16"])
def test_the_precision_is_that_of_the_launch(asked: str) -> None:
    """Without its one card before Ampere a run in fp16 would go on in bf16, and with it the other way round: another training."""
    train = {"global_batch": 12, "epochs": 1, "learning_rate": 1e-3, "precision": asked}
    recipe, all_well = healthy.recipe(train=train), healthy.gpu()
    card = {"name": "NVIDIA GeForce RTX 2060", "compute_capability": "7.5"}
    old = healthy.with_facts(all_well, "laptop", gpu={"cards": [{**as_json(one), **card} for one in all_well.facts["laptop"].gpu.cards]})
    for began, later in ((old, all_well), (all_well, old)):
        plan = make(began, recipe)
        assert make(later, recipe).precision != plan.precision or asked != "auto"
        assert make(later, as_begun(recipe, plan)).precision == plan.precision
