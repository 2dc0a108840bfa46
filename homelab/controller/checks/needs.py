"""What checks need before they can judge, as predicates that subjects share: None where it is there, else what is missing."""

from __future__ import annotations

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.checks.evidence import Evidence


def recipe(evidence: Evidence) -> str | None:
    """None with a recipe."""
    return Hint("needs a recipe: {}", homelab("preflight RECIPE")) if evidence.recipe is None else None


def model(evidence: Evidence) -> str | None:
    """None with a recipe that names a base model."""
    if evidence.recipe is not None and evidence.recipe.model is None:
        return "the recipe's [script] brings its own"
    return recipe(evidence)
