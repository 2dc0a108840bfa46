"""The work of one attempt and the machines for it: what every strategy plans with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homelab.config.recipe import Recipe, TrainRecipe
from homelab.facts.node import Facts
from homelab.planning import stored_base
from homelab.planning.inputs import PlanInputs, Throughputs
from homelab.planning.machines import Machines
from homelab.planning.memory import architecture, division
from homelab.planning.memory.architecture import Architecture
from homelab.planning.memory.division import Division
from homelab.planning.performance import workload
from homelab.planning.performance.workload import Workload


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
    """The same for a recipe of the built-in worker. `shape` is None where the model is not known. `division`: what a strategy makes of it."""

    recipe: TrainRecipe
    shape: Architecture | None
    workload: Workload
    division: Division = division.WHOLE

    @property
    def warnings(self) -> tuple[str, ...]:
        """The measured speeds that cannot be used, with their reasons."""
        return self.workload.warnings


def of(inputs: PlanInputs, machines: Machines, precision: str) -> Job:
    """The job of these inputs on these machines."""
    if not isinstance(inputs.recipe, TrainRecipe):
        return Job(inputs.recipe, machines, precision, inputs.throughputs, inputs.resume_step)
    config = stored_base.config_of(inputs.recipe.model.name, machines.facts, inputs.config)
    held = stored_base.as_held(inputs.recipe, config)
    shape = architecture.from_config(config or {})
    work = workload.estimate(inputs.recipe, machines, precision, shape, inputs.data)
    return TrainingJob(held, machines, precision, inputs.throughputs, inputs.resume_step, shape, work)


def shape_of(name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None) -> Architecture | None:
    """The model's shape, by `stored_base.config_of`; None where no formula counts it."""
    return architecture.from_config(stored_base.config_of(name, facts, local) or {})
