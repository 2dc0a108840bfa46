"""A larger global batch where the wire is slow: as far as the recipe allows, in whole multiples, once, and never without saying so."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.recipe import Recipe, TrainRecipe, parse_recipe
from homelab.controller.planning import plan as planning
from homelab.controller.planning.alternatives import global_batch
from homelab.controller.planning.types import Plan
from homelab.shared.recipe.parallel import Parallel
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import file, with_file

NAMES = healthy.NAMES


def recipe(**train: Any) -> TrainRecipe:
    return healthy.recipe(train={"global_batch": 12, "steps": 100, "warmup_steps": 10, "learning_rate": 1e-3, "precision": "fp32", **train})


def settled(wanted: Recipe, sync_s: float, *, measured: bool = True) -> tuple[Recipe, Plan]:
    """On three nodes of 1 ms per token (61 tokens a row, so 12 rows are about 0.25 s) whose wire takes `sync_s`."""
    seen = healthy.cpu(wanted)
    ranks = [{"local_rank": 0, "step_s": 0.0, "micro_batch_s": 0.0, "token_s": 1e-3}]
    for name in NAMES if measured else ():
        seen = with_file(seen, name, file(name, sync_s=sync_s, ranks=ranks))
    return global_batch.settle(builders.plan_inputs(seen.cluster, wanted, seen.facts))


def why(made: Plan) -> str:
    return next(choice.because for choice in made.choices if choice.subject == "global batch")


def test_raised_until_the_wire_is_a_tenth() -> None:
    wanted = recipe(global_batch_max=1200)
    found, made = settled(wanted, 0.5)
    assert found.train and made.time
    assert found.train.global_batch % 12 == 0 and 200 <= found.train.global_batch <= 252
    assert made.time.wire_s / made.time.step_s <= 0.1
    one_less = global_batch.times(wanted, found.train.global_batch // 12 - 1)
    _, before = settled(one_less, 0.5)
    assert before.time and before.time.wire_s / before.time.step_s > 0.1, "no further than needed"
    assert sum(rank.share for rank in made.ranks) == found.train.global_batch
    assert [warning.startswith("law: global_batch is") for warning in made.warnings] == [True] and "takes 10% now" in why(made)


def test_the_same_samples_are_trained_on() -> None:
    found, _ = settled(recipe(global_batch_max=1200), 0.5)
    assert found.train and found.train.steps
    factor = found.train.global_batch // 12
    assert found.train.steps == -(-100 // factor) and found.train.warmup_steps == 1
    assert found.train.learning_rate == 1e-3 and found.train.global_batch_max is None
    assert parse_recipe(found.model_dump(mode="python")) == found


def test_no_further_than_allowed() -> None:
    found, made = settled(recipe(global_batch_max=40), 0.5)
    assert found.train and found.train.global_batch == 36 and "more than global_batch_max allows" in why(made)
    wanted = recipe(global_batch_max=23)
    found, made = settled(wanted, 0.5)
    assert found is wanted and "no whole multiple" in why(made) and not made.warnings


def test_only_where_it_is_needed_known_and_allowed() -> None:
    for wanted, sync_s, measured, words in (
        (recipe(global_batch_max=1200), 0.01, True, "the network takes 4% of a step"),
        (recipe(global_batch_max=1200), 0.5, False, "no speed is known yet"),
    ):
        found, made = settled(wanted, sync_s, measured=measured)
        assert found is wanted and words in why(made) and not made.warnings
    wanted = recipe()
    found, made = settled(wanted, 0.5)
    assert found is wanted and not [choice for choice in made.choices if choice.subject == "global batch"]
    assert made.time and any("more than 10% of a step" in line for line in made.time.verdict)
    script = parse_recipe({"script": {"path": "x.py"}})
    assert settled(script, 0.5)[0] is script


def test_not_where_each_pass_pays_for_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A larger batch has more passes then: the training would change, and the part of the wire would stay."""
    plans: list[str] = []
    monkeypatch.setattr(planning, "make", lambda inputs, make=planning.make: plans.append("") or make(inputs))
    wanted = recipe(global_batch_max=12 * 64)
    wanted = wanted.model_copy(update={"parallel": Parallel(strategy="zero3", micro_batch=4)})
    found, made = settled(wanted, 0.5)
    assert found is wanted and not made.warnings and "and hardly less with 768" in why(made), why(made)
    assert len(plans) < 10
