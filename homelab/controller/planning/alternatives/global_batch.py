"""A larger global batch where the wire is slow and the recipe allows it: the one way in which a cluster may change a training.

Every step pays once for the wire, however many rows it has. [train] global_batch_max says how far a launch may go; what it
chooses is written into the run's recipe, and every later attempt of the run keeps it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.planning import plan as planning
from homelab.controller.planning.advice.advice import WIRE_PART
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.types import Choice, Plan

_ENOUGH = 1.05  # times the least part of a step that any batch reaches


def settle(inputs: PlanInputs) -> tuple[Recipe, Plan]:
    """The recipe that is launched and its plan. The same recipe where it does not allow more, or the wire needs no more."""
    plan, recipe = planning.make(inputs), inputs.recipe
    if not isinstance(recipe, TrainRecipe) or recipe.train.global_batch_max is None:
        return recipe, plan
    batch, most = recipe.train.global_batch, recipe.train.global_batch_max // recipe.train.global_batch
    if plan.time is None:
        return recipe, _with(plan, str(batch), "not raised: no speed is known yet, so the cost of the network is unknown")
    part = plan.time.wire_s / plan.time.step_s
    if part <= WIRE_PART:
        return recipe, _with(plan, str(batch), f"not raised: the network takes {part:.0%} of a step")
    if most < 2:
        return recipe, _with(plan, str(batch), f"the network takes {part:.0%} of a step, but global_batch_max allows no whole multiple")
    # Computing grows with the batch, the wire does not: the first guess is right but for rounding.
    factor = max(2, math.ceil((1 - WIRE_PART) / WIRE_PART * plan.time.wire_s / plan.time.compute_s))
    tried, more = [(part, recipe, plan)], 1
    while tried[-1][0] > WIRE_PART:
        raised = times(recipe, min(factor, most))
        plan = planning.make(dataclasses.replace(inputs, recipe=raised))
        assert plan.time is not None
        tried.append((plan.time.wire_s / plan.time.step_s, raised, plan))
        if factor >= most:
            break
        factor, more = factor + more, 2 * more
    # Some strategies send all weights for every pass: their part of a step stays, and a larger batch changes the training for nothing.
    least = max(WIRE_PART, _ENOUGH * min(now for now, _, _ in tried))
    now, raised, plan = next(entry for entry in tried if entry[0] <= least)
    if raised is recipe:
        return recipe, _with(plan, str(batch), f"not raised: the network takes {part:.0%} of a step, and hardly less with {batch * most}")
    limit = "less would need more than global_batch_max allows" if raised is tried[-1][1] else "a larger batch would hardly lower it"
    reached = "" if now <= WIRE_PART else f"; {limit}"
    because = f"the network took {part:.0%} of a step with {batch}, and takes {now:.0%} now{reached}"
    warning = f"law: global_batch is {raised.train.global_batch} instead of {batch}, as global_batch_max allows, because {because}; another cluster may choose another"
    plan = _with(plan, str(raised.train.global_batch), because)
    return raised, plan.model_copy(update={"warnings": (*plan.warnings, warning)})


def times(recipe: TrainRecipe, factor: int) -> TrainRecipe:
    """The recipe with `factor` times the global batch, trained on the same samples: `steps` and `warmup_steps` shrink with it."""
    train = replace(
        recipe.train,
        global_batch=recipe.train.global_batch * factor,
        global_batch_max=None,  # it was used: nothing raises it again
        steps=None if recipe.train.steps is None else math.ceil(recipe.train.steps / factor),
        warmup_steps=math.ceil(recipe.train.warmup_steps / factor),
    )
    return recipe.model_copy(update={"train": train})


def _with(plan: Plan, value: str, because: str) -> Plan:
    return plan.model_copy(update={"choices": (*plan.choices, Choice(subject="global batch", value=value, because=because))})
