"""What of a recipe decides the training, of its sections as run.json has them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.shared.recipe.neutral import NEUTRAL

_SECTIONS = ("model", "data", "method", "train", "script")  # the others may change on a recovery
_BY_EVALUATION = ("keep_best", "early_stopping")  # of [train]


def deciding(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the recipe that its fingerprint is made of. Raises KeyError, TypeError or AttributeError for what is no recipe."""
    law: dict[str, Any] = {name: recipe.get(name) for name in _SECTIONS}
    for name, neutral in NEUTRAL.items():
        if law[name]:
            law[name] = {key: value for key, value in law[name].items() if key not in neutral or value != neutral[key]}
    if law["method"]:
        law["method"].pop("backend", None)  # the library (transformers or Unsloth) is no part of the law
    if law["train"]:
        if any(law["train"].get(key) for key in _BY_EVALUATION):
            law["eval_every_steps"] = recipe["tracking"].get("eval_every_steps")
        else:
            law["train"] = {key: value for key, value in law["train"].items() if key not in _BY_EVALUATION}
    if law["script"] and recipe.get("environment"):
        law["environment"] = recipe["environment"]  # a program may read any of it
    return law
