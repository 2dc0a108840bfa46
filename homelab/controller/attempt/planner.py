"""The plan of a launch or a recovery, from what was gathered: the same plan that `homelab plan` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from homelab.controller.attempt import base_model, card_table, inputs
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.launchers import registry
from homelab.controller.planning import plan as planning
from homelab.controller.planning.alternatives import global_batch
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.types import Plan
from homelab.controller.remote import ship


def inputs_of(cluster: Cluster, facts: Mapping[str, Facts], recipe: Recipe, items: list[RecipeInput], run: str) -> PlanInputs:
    """What the first attempt of a run on all nodes of `cluster` is planned from; without facts (offline), cluster.toml is believed."""
    shipped = {item.role: _below_workdir(item.node_path) for item in items if item.kind == "shipped"}
    return PlanInputs(
        cluster, recipe, facts, run, recipe.parallel.port, code=_below_workdir(ship.code_dir), script=shipped.get("script"),
        files=tuple(shipped.values()), data=inputs.files_of(items),
        config=base_model.look(recipe).config, measured_cards=card_table.shipped(),
    )  # fmt: skip


def inputs_from(evidence: Evidence, recipe: Recipe, items: list[RecipeInput], run: str, **changes: Any) -> PlanInputs:
    """The same for the nodes that answered. `changes` are other fields of `PlanInputs`."""
    of_run = inputs_of(evidence.cluster.only(tuple(evidence.facts)), evidence.facts, recipe, pinned(items, evidence), run)
    return replace(of_run, throughputs=evidence.throughputs, **{"moment": datetime.now(UTC), **changes})


def planned(of: PlanInputs) -> Plan:
    """The plan that is executed: with the commands of `homelab launch`."""
    return registry.rendered(planning.make(of))


def settled(of: PlanInputs, launcher: str = registry.DEFAULT) -> tuple[Recipe, Plan]:
    """The recipe with its open batch settled, and its plan with the commands of a launcher."""
    recipe, plan = global_batch.settle(of)
    return recipe, registry.rendered(plan, launcher)


def pinned(items: list[RecipeInput], evidence: Evidence) -> list[RecipeInput]:
    """The inputs with hub data at the commit that the sample was read from: every node and every attempt loads it."""
    files = evidence.sample.files if evidence.sample is not None else {}
    commits = {role: file.revision for role, file in files.items() if file.revision}
    return [
        replace(item, hub=replace(item.hub, revision=commits[item.role])) if item.hub and item.role in commits else item for item in items
    ]


def _below_workdir(path: Callable[[str], str]) -> str:
    return path("").removeprefix("/")
