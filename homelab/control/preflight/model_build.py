"""The base model without its weights, on one node, with the recipe's own method: what a launch would end at is found in seconds."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from homelab.checks.evidence import Evidence
from homelab.config.recipe import Recipe, TrainRecipe
from homelab.errors import HomelabError
from homelab.facts.model_build import BuildResult
from homelab.facts.node import Facts
from homelab.planning.memory import dry_run
from homelab.remote import ship
from homelab.remote.fanout import Fleet

_LOOK_S = 150.0


def look(fleet: Fleet, evidence: Evidence, recipe: Recipe) -> BuildResult | None:
    """What one node found; None for a [script], and where no node has both the model and the packages. Raises nothing: who could not is `refused`.

    The second look at the same model and method is answered from what the node has kept.
    """
    node = dry_run.able(evidence.facts, recipe) if isinstance(recipe, TrainRecipe) else None
    if node is None or not isinstance(recipe, TrainRecipe):
        return None
    try:
        answer = fleet.agent(node).ask("build-model", question(evidence.facts[node], recipe), timeout_s=_LOOK_S)
        return BuildResult.model_validate({**answer["built"], "node": node})
    except HomelabError as error:
        return BuildResult(node=node, refused=error.message[:500])
    except (ValueError, TypeError, KeyError):  # pydantic's is a ValueError
        return BuildResult(node=node, refused="its answer is none that this homelab understands")


def question(facts: Facts, recipe: TrainRecipe) -> dict[str, Any]:
    """The request; its key names all that the answer depends on."""
    model = facts.model
    assert model is not None
    asked = {
        "model": model.path or recipe.model.name, "revision": None, "method": recipe.method.model_dump(mode="json"),
        "train": {**recipe.train.model_dump(mode="json", include={"optimizer", "seed"}), "gradient_checkpointing": False},
        "precision": "bf16" if recipe.train.precision == "auto" else recipe.train.precision, "strategy": recipe.parallel.strategy,
    }  # fmt: skip
    depends = [asked, model.model_dump(mode="json", include={"config", "files", "path"}), ship.archive()[0], facts.python.executable, facts.python.packages]
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    return {**asked, "key": key, "recipe_environment": recipe.environment}
