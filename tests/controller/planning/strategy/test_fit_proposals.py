"""`plan --fit` proposes nothing that the strategy refuses: every proposal, for every strategy and method."""

from __future__ import annotations

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.machines import machines
from homelab.controller.planning.memory import recipe_edits
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.work import job
from tests import builders
from tests.builders import NAMES

LORA = {"kind": "lora"}
METHODS = (
    LORA,
    *(
        pytest.param(method, marks=pytest.mark.thorough)
        for method in ({"kind": "lora", "base": "8bit"}, {"kind": "qlora"}, {"kind": "full"})
    ),
)


@pytest.mark.parametrize("strategy", ["auto", *registry.STRATEGIES])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_proposal_is_one_that_the_strategy_takes(strategy: str, method: dict[str, str]) -> None:
    seen = 0
    for size_gb in (14,):
        nodes = {name: {"gpus": [{"model": "RTX 4090", "vram_gb": size_gb}] * 2} for name in NAMES[:2]}
        recipe = builders.recipe(
            model={"name": "meta-llama/Llama-2-13b-hf"}, method=method, parallel={"strategy": strategy, "micro_batch": 4},
            train={"global_batch": 16, "learning_rate": 1e-4, "steps": 10, "seq_len": 4096},
        )  # fmt: skip
        inputs = builders.plan_inputs(builders.cluster(NAMES[:2], nodes=nodes), recipe, {})
        chosen = machines.choose(inputs)
        try:
            registry.choose_strategy(job.of(inputs, chosen, "bf16"))
            continue
        except DoesNotFit as error:
            scenario = error.scenario
        for way in recipe_edits.fixes(recipe, scenario):
            seen += 1
            changed = builders.plan_inputs(builders.cluster(NAMES[:2], nodes=nodes), recipe_edits.changed(recipe, way.edits), {})
            try:
                registry.choose_strategy(job.of(changed, machines.choose(changed), "bf16"))
            except DoesNotFit:
                continue  # what else is held on a card is another test
            except InputError as error:
                raise AssertionError(f"{way} is refused: {error.message}") from error
    if strategy in ("ddp", "zero2") and method == LORA:
        assert seen, "there is something to walk"
