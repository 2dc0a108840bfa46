"""The work of one attempt and the machines for it: what every strategy plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import PlanInputs, Throughputs
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.memory import division
from homelab.controller.planning.memory.division import Division
from homelab.controller.planning.model import architecture, model_config, stored_base
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.work import workload
from homelab.controller.planning.work.workload import Workload


@dataclass(frozen=True)
class Job:
    """A recipe on the machines that take part. `throughputs` as in `PlanInputs`."""

    recipe: Recipe
    machines: Machines
    precision: str  # bf16 | fp16 | fp32
    throughputs: Throughputs
    resume_step: int

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before the work is divided."""
        return ()


@dataclass(frozen=True)
class TrainingJob(Job):
    """The same for a recipe of the built-in worker. `shape` is None where no formula counts the model, `config` (its config.json) where
    nobody knows it. `division`: what a strategy makes of it."""

    recipe: TrainRecipe
    shape: Architecture | None
    workload: Workload
    division: Division = division.WHOLE
    config: Mapping[str, Any] | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The measured speeds that cannot be used, with their reasons."""
        return self.workload.warnings


def of(inputs: PlanInputs, machines: Machines, precision: str) -> Job:
    """The job of these inputs on these machines. Raises InputError for a model that cannot be trained so."""
    if not isinstance(inputs.recipe, TrainRecipe):
        return Job(inputs.recipe, machines, precision, inputs.throughputs, inputs.resume_step)
    name = inputs.recipe.model.name
    config = stored_base.config_of(name, machines.facts, inputs.config)
    model_config.refuse_numbers(name, config or {})
    if stored_base.on_nodes(machines.facts) is None:  # else transformers has the last word
        model_config.refuse_kind(name, config)
    held = stored_base.as_held(inputs.recipe, config)
    shape = architecture.from_config(config or {})
    work = workload.estimate(inputs, machines, precision, shape)
    return TrainingJob(held, machines, precision, inputs.throughputs, inputs.resume_step, shape, work, config=config)


def shape_of(name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> Architecture | None:
    """The model's shape, by `stored_base.config_of`; None where no formula counts it."""
    return architecture.from_config(stored_base.config_of(name, facts, local) or {})
