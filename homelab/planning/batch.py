"""A larger global batch where the wire is slow and the recipe allows it: the one way in which a cluster may change a training.

Every step pays once for the wire, however many rows it has. [train] global_batch_max says how far a launch may go; what it
chooses is written into the run's recipe, and every later attempt of the run keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from homelab.config.recipe import Recipe
from homelab.planning.model import Choice, Plan
from homelab.planning.verdict import WIRE_PART


def settle(recipe: Recipe, make: Callable[[Recipe], Plan]) -> tuple[Recipe, Plan]:
    """The recipe that is launched and its plan, from `make`. The same recipe where it does not allow more, or the wire needs no more."""
    plan = make(recipe)
    if recipe.train is None or recipe.train.global_batch_max is None:
        return recipe, plan
    batch, most = recipe.train.global_batch, recipe.train.global_batch_max // recipe.train.global_batch
    if plan.time is None:
        return recipe, _with(plan, str(batch), "not raised: no speed is known yet, so nobody knows what the wire costs")
    part = plan.time.wire_s / plan.time.step_s
    if part <= WIRE_PART:
        return recipe, _with(plan, str(batch), f"not raised: the wire takes {part:.0%} of a step")
    if most < 2:
        return recipe, _with(
            plan, str(batch), f"the wire takes {part:.0%} of a step, but global_batch_max allows no whole multiple"
        )
    # Computing grows with the batch, the wire does not: the first guess is right but for rounding.
    factor = max(2, math.ceil((1 - WIRE_PART) / WIRE_PART * plan.time.wire_s / plan.time.compute_s))
    while True:
        factor = min(factor, most)
        raised = times(recipe, factor)
        made = make(raised)
        assert made.time is not None and raised.train is not None
        now = made.time.wire_s / made.time.step_s
        if now <= WIRE_PART or factor == most:
            break
        factor += 1
    reached = "" if now <= WIRE_PART else ", more than global_batch_max allows would be needed"
    because = f"the wire took {part:.0%} of a step with {batch}, and takes {now:.0%} now{reached}"
    warning = f"law: global_batch is {raised.train.global_batch} instead of {batch}, as global_batch_max allows, because {because}; another cluster may choose another"
    made = _with(made, str(raised.train.global_batch), because)
    return raised, made.model_copy(update={"warnings": (*made.warnings, warning)})


def times(recipe: Recipe, factor: int) -> Recipe:
    """The recipe with `factor` times the global batch, trained on the same samples: `steps` and `warmup_steps` shrink with it."""
    assert recipe.train is not None
    train = recipe.train.model_copy(update={
        "global_batch": recipe.train.global_batch * factor,
        "global_batch_max": None,  # it was used: nothing raises it again
        "steps": None if recipe.train.steps is None else math.ceil(recipe.train.steps / factor),
        "warmup_steps": math.ceil(recipe.train.warmup_steps / factor),
    })  # fmt: skip
    return recipe.model_copy(update={"train": train})


def _with(plan: Plan, value: str, because: str) -> Plan:
    return plan.model_copy(
        update={"choices": (*plan.choices, Choice(subject="global batch", value=value, because=because))}
    )
