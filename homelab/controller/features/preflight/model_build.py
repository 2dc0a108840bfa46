"""The base model without its weights, on one node, with the recipe's own method: what a launch would end at is found in seconds."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.controller.planning.memory import dry_run
from homelab.controller.planning.model import known_models
from homelab.controller.remote import ship
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import hub_token
from homelab.shared.protocol.worker_messages import BuildResult

_LOOK_S = 150.0


def look(fleet: Fleet, evidence: Evidence, recipe: Recipe) -> BuildResult | None:
    """What one node found; None for a [script], and where no node has the packages and either the model or a way to the hub, which then gives the
    small files. Raises nothing: who could not is `refused`.

    The second look at the same model and method is answered from what the node has kept; the hub is asked every time.
    """
    if not isinstance(recipe, TrainRecipe):
        return None
    node = dry_run.able(evidence.facts, recipe) or dry_run.able_to_fetch(evidence.facts, recipe)
    if node is None:
        return None
    try:
        answer = fleet.agent(node).ask("build-model", question(evidence.facts[node], recipe), timeout_s=_LOOK_S)
        return read(BuildResult, {**answer["built"], "node": node})
    except HomelabError as error:
        return BuildResult(node=node, refused=error.message[:500])
    except (ValueError, TypeError, KeyError):  # pydantic's is a ValueError
        return BuildResult(node=node, refused="this version of homelab cannot read its answer")


def known_config(evidence: Evidence) -> Evidence:
    """The same with the config.json that one node saw on the hub, for the plan; the node still lacks the model."""
    built = evidence.build
    facts = evidence.facts.get(built.node) if built is not None else None
    if built is None or not built.config or facts is None or facts.model is None or facts.model.found:
        return evidence
    told = facts.model_copy(update={"model": facts.model.model_copy(update={"config": built.config})})
    return replace(evidence, facts={**evidence.facts, built.node: told})


def question(facts: Facts, recipe: TrainRecipe) -> dict[str, Any]:
    """The request; its key names all that the answer depends on."""
    model = facts.model
    assert model is not None
    asked = {
        "model": model.path or recipe.model.name, "revision": None, "method": asdict(recipe.method),
        "train": {"optimizer": recipe.train.optimizer, "seed": recipe.train.seed, "gradient_checkpointing": False},
        "precision": "bf16" if recipe.train.precision == "auto" else recipe.train.precision, "strategy": recipe.parallel.strategy,
    }  # fmt: skip
    depends = [
        asked,
        model.model_dump(mode="json", include={"config", "files", "path"}),
        ship.CODE.content_hash(),
        facts.python.executable,
        facts.python.packages,
    ]
    key = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()
    if not model.config:  # a launch brings the token along, too
        fetching = {"revision": recipe.model.revision, "fetch": True, "known": known_models.names(), "secrets": hub_token.to_send()}
        return {**asked, **fetching, "key": key, "recipe_environment": recipe.environment}
    return {**asked, "key": key, "recipe_environment": recipe.environment}
