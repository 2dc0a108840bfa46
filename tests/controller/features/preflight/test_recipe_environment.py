"""The recipe's [environment] decides what a probe sees (HF_HOME, proxies): every question about the recipe sends it to the node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.preflight import data_sample, gather, memory_dry_run
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

ENVIRONMENT = {"HF_HOME": "/big/hub"}
RECIPE = builders.recipe(environment=ENVIRONMENT)
REFUSAL = HomelabError("asked", where="here", hint="none")


def asked_by(fleet: FakeFleet, verb: str) -> list[Any]:
    """The environment in each request of this verb."""
    requests = [request for node in fleet.nodes.values() for request in node.requests]
    return [request.get("recipe_environment") for request in requests if request["verb"] == verb]


def test_of_the_facts(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path).answer("facts", REFUSAL)
    gather.facts(fleet, recipe=RECIPE, material=[], port=29500)
    assert asked_by(fleet, "facts") == [ENVIRONMENT] * 3


def test_of_the_look_into_the_data(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path).answer("sample-data", REFUSAL)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    sample = data_sample.look(fleet, healthy.cpu(RECIPE), RECIPE, [RecipeInput("train", "shipped", str(rows), rows, "0" * 64)])
    assert sample is not None and sample.refused == "asked"
    assert asked_by(fleet, "sample-data") == [ENVIRONMENT]


def test_of_the_dry_run(tmp_path: Path) -> None:
    fleet = FakeFleet(tmp_path).answer("dry-run", REFUSAL)
    evidence = healthy.gpu(RECIPE)
    plan = builders.make_plan(evidence.cluster, RECIPE, evidence.facts)
    improved = memory_dry_run.improve(fleet, plan, RECIPE, evidence.facts, lambda text: None)
    assert asked_by(fleet, "dry-run") == [ENVIRONMENT]
    assert any("estimated by formulas: asked" in warning for warning in improved.warnings)
