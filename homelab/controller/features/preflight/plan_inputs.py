"""What the plan of a recipe is made from: the answers of the nodes, or (offline) cluster.toml alone. Nothing is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from homelab.controller.attempt import base_model, data_files, hub_config, inputs, planner
from homelab.controller.base.errors import InputError
from homelab.controller.base.say import Say
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import data_sample, gather, memory_dry_run
from homelab.controller.planning import verdict
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import cards, machines
from homelab.controller.planning.model import model_config
from homelab.controller.planning.types import Plan
from homelab.controller.planning.verdict import Verdict
from homelab.controller.planning.work.job import shape_of
from homelab.controller.remote.fanout import Fleet


@dataclass(frozen=True)
class PlanSources:
    """`notes`: what a person should know of it. `blocked`: what of the recipe's files cannot be read here. `offline`: no node was asked.

    `evidence`: the answers of the nodes; None where none was asked.
    """

    inputs: PlanInputs
    notes: tuple[str, ...]
    blocked: InputError | None
    offline: bool
    evidence: Evidence | None = None

    def judged(self, plan: Plan) -> Verdict:
        """The verdict on a plan that was made from this."""
        recipe = self.inputs.recipe
        return verdict.of(plan, recipe, self.blocked, inputs=self.inputs, others=base_model.beside(recipe), offline=self.offline)


def gather_for_plan(cluster: Cluster, training: Recipe, recipe: Path, *, offline: bool, say: Say) -> PlanSources:
    """Ask all nodes, or none. Raises InputError for a recipe whose files are not there, and the error of a node if none answers."""
    if offline:
        _refuse_other_model(training)
        try:
            items = inputs.of_recipe(training, recipe)
            return PlanSources(planner.inputs_of(cluster, {}, training, items, recipe.stem), (), data_files.fault(items), True)
        except InputError as error:  # only the number of rows is missed
            of_file = planner.inputs_of(cluster, {}, training, [], recipe.stem)
            return PlanSources(of_file, (f"{error.message}: {error.where}",), error, True)
    items = inputs.of_recipe(training, recipe)
    with Fleet(cluster) as fleet:
        evidence = gather.evidence(fleet, recipe=training, material=items, port=training.parallel.port, say=say, for_person=True)
        blocked = data_files.fault(items) or data_sample.data_fault(fleet, evidence, training, items, say)
    if not evidence.facts:
        raise next(iter(evidence.unreachable.values()))
    notes = tuple(f"{name} did not answer, so it is not in this plan: {error.message}" for name, error in evidence.unreachable.items())
    of_nodes = planner.inputs_from(evidence, training, items, recipe.stem)
    if model_config.on_nodes(evidence.facts) is None:
        _refuse_other_model(training)
        of_nodes, told = _with_hub(of_nodes, say)
        notes += told
    return PlanSources(of_nodes, notes, blocked, False, evidence)


def _with_hub(of: PlanInputs, say: Say) -> tuple[PlanInputs, tuple[str, ...]]:
    """The same with the config.json that the hub has of a model which is not known here, and why it is not had."""
    model = of.recipe.model
    if model is None or model.is_folder or of.config is not None or shape_of(model.name, of.facts) is not None:
        return of, ()
    say("asking the hub for the model's config.json")
    fetched = hub_config.fetch(model)
    return replace(of, config=fetched.config), (fetched.note,) if fetched.note else ()


def _refuse_other_model(training: Recipe) -> None:
    """Raises InputError where no node says what the model is, and what lies on this machine is none."""
    fault = base_model.look(training).fault
    if fault is not None:
        raise fault


def tried(plan: Plan, of: PlanInputs, say: Say) -> Plan:
    """The plan with its memory as a dry run on a node finds it."""
    with Fleet(of.cluster) as fleet:
        slots = machines.choose(replace(of, facts=cards.of_cluster(of.cluster, of.facts))).slots
        return memory_dry_run.improve(
            fleet, plan, of.recipe, of.facts, say, free={slot.rank: slot.memory() for slot in slots}, config=of.config
        )
