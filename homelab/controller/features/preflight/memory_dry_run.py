"""A dry run of the plan's training step on one capable node: the real model without its weights, to check the formulas of the plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.interpreter import uses_unsloth
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import dry_run
from homelab.controller.planning.model import model_config
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.job import shape_of
from homelab.controller.remote.fanout import Fleet

TIME_LIMIT_S = 60.0


def improve(
    fleet: Fleet, plan: Plan, recipe: Recipe, facts: Mapping[str, Facts], say: Callable[[str], None], *, free: Mapping[int, tuple[int | None, int]] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """The plan with its memory as a dry run found it. Where none can be made, the plan as it is, with a warning when one was tried.

    `free`: for a model whose shape the planner does not know, rank -> (memory of its card or machine, what of it is not free), in bytes.
    `config`: the model's config.json as this machine or the hub has it, for a model that is on no node.
    """
    if not isinstance(recipe, TrainRecipe):
        return plan
    shape = shape_of(recipe.model.name, facts, config, recipe.method)
    node = dry_run.able(facts, recipe, is_told=config is not None)
    situations = dry_run.situations(plan, recipe)
    if node is None or not situations:
        return plan
    say(f"dry run of a training step on {node}")
    model = facts[node].model
    asked = model.config if model is not None and model.config else dict(config or {})
    request = {
        "config": asked,
        "method": dataclasses.asdict(recipe.method),
        # What is tried is transformers' model. Unsloth's has the same weights and layers, and a loss in chunks, always.
        "train": dataclasses.asdict(recipe.train) | ({"fused_loss": True} if uses_unsloth(recipe) else {}),
        "situations": [dataclasses.asdict(one) for one in situations],
        "time_limit_s": TIME_LIMIT_S,
        "recipe_environment": recipe.environment,
    }
    try:
        answer = fleet.agent(node).ask("dry-run", request, timeout_s=TIME_LIMIT_S + 20)
    except HomelabError as error:
        text = f"no dry run on {node}, {'the memory is estimated by formulas' if shape is not None else 'so the memory is not known'}: {error.message}"
        return plan.model_copy(update={"warnings": (*plan.warnings, text)})
    held = model_config.as_held(recipe, asked)
    if shape is None and registry.of_plan(plan).divides_weights:
        return plan  # a rank needs less than the whole model: it is left without an estimate
    if shape is None:
        return dry_run.without_shape(plan, held, node, situations, answer["results"], free or {})
    return dry_run.applied(plan, held, shape, node, situations, answer["results"])
