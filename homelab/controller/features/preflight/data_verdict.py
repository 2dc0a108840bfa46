"""Whether a node can read a recipe's data, for a plan: what preflight would say of it, without the rest of preflight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import data_sample
from homelab.controller.remote.fanout import Fleet


def fault(fleet: Fleet, evidence: Evidence, recipe: Recipe, items: Sequence[RecipeInput], say: Say) -> InputError | None:
    """The first finding that fails; None where there is none, or nothing to look at."""
    if recipe.data is None or not evidence.facts:
        return None
    say("looking into the data")
    seen = replace(evidence, sample=data_sample.look(fleet, evidence, recipe, list(items)))
    failed = [finding for finding in registry.judge_all(seen, registry.skipped(only=["data"], skip=[])) if finding.level == "fail"]
    return InputError(failed[0].message, where=f"check {failed[0].check}", hint=failed[0].hint) if failed else None
