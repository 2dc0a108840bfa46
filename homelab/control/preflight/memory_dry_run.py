"""A dry run of the plan's training step on one capable node: the real model without its weights, to check the formulas of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from homelab.config.interpreter import uses_unsloth
from homelab.config.recipe import Recipe, TrainRecipe
from homelab.errors import HomelabError
from homelab.facts.node import Facts
from homelab.planning.job import shape_of
from homelab.planning.memory import dry_run
from homelab.planning.types import Plan
from homelab.remote.fanout import Fleet

TIME_LIMIT_S = 60.0


def improve(fleet: Fleet, plan: Plan, recipe: Recipe, facts: Mapping[str, Facts], say: Callable[[str], None]) -> Plan:
    """The plan with its memory as a dry run found it. Where none can be made, the plan as it is, with a warning when one was tried."""
    if not isinstance(recipe, TrainRecipe):
        return plan
    shape, node = shape_of(recipe.model.name, facts), dry_run.able(facts, recipe)
    situations = dry_run.situations(plan, recipe)
    if shape is None or node is None or not situations:
        return plan
    say(f"dry run of a training step on {node}")
    model = facts[node].model
    assert model is not None
    request = {
        "config": model.config,
        "method": recipe.method.model_dump(mode="json"),
        # What is tried is transformers' model. Unsloth's has the same weights and layers, and a loss in chunks, always.
        "train": recipe.train.model_dump(mode="json") | ({"fused_loss": True} if uses_unsloth(recipe) else {}),
        "situations": [dataclasses.asdict(one) for one in situations],
        "time_limit_s": TIME_LIMIT_S,
        "recipe_environment": recipe.environment,
    }
    try:
        answer = fleet.agent(node).ask("dry-run", request, timeout_s=TIME_LIMIT_S + 20)
    except HomelabError as error:
        text = f"no dry run on {node}, the memory is estimated by formulas: {error.message}"
        return plan.model_copy(update={"warnings": (*plan.warnings, text)})
    return dry_run.applied(plan, recipe, shape, node, situations, answer["results"])
