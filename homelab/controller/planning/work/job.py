"""The work of one attempt and the machines for it, before it is divided: recipe, model, rows and speeds. Every strategy plans with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import PlanInputs, Throughputs
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.memory import attention, division
from homelab.controller.planning.memory.division import Division
from homelab.controller.planning.model import adapters, families, model_config
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.speed import dataset_size, speed_profiles
from homelab.controller.planning.speed.dataset_size import DataFile, Rows
from homelab.controller.planning.work import speed_estimate
from homelab.controller.planning.work.speed_estimate import Guessing, SpeedEstimate
from homelab.shared.recipe import Method

_ADAPTERS = Method(kind="lora")  # where no recipe says how a model is trained


@dataclass(frozen=True)
class Workload:
    """Speeds and rows. `held_out_rows`: rows of one evaluation, 0 where they are not counted, None where nothing is evaluated."""

    speeds: SpeedEstimate
    rows: Rows
    held_out_rows: int | None
    warnings: tuple[str, ...] = ()


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
    nobody knows it. `division`: what a strategy makes of it. `last_layers` as in `PlanInputs`."""

    recipe: TrainRecipe
    shape: Architecture | None
    workload: Workload
    division: Division = division.WHOLE
    config: Mapping[str, Any] | None = None
    last_layers: Mapping[tuple[str, int], range] = field(default_factory=dict)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The measured speeds that cannot be used, with their reasons."""
        return self.workload.warnings


def of(inputs: PlanInputs, machines: Machines, precision: str) -> Job:
    """The job of these inputs on these machines. Raises InputError for a model that cannot be trained so."""
    if not isinstance(inputs.recipe, TrainRecipe):
        return Job(inputs.recipe, machines, precision, inputs.throughputs, inputs.resume_step)
    last = inputs.last_layers
    name = inputs.recipe.model.name
    config = model_config.config_of(name, machines.facts, inputs.config)
    model_config.refuse_numbers(name, config or {})
    if model_config.on_nodes(machines.facts) is None:  # else transformers has the last word
        model_config.refuse_kind(name, config)
    held = model_config.as_held(inputs.recipe, config)
    shape = adapters.counted(families.from_config(config or {}), held.method)
    work = _workload(inputs, machines, precision, shape)
    return TrainingJob(held, machines, precision, inputs.throughputs, inputs.resume_step, shape, work, config=config, last_layers=last)


def shape_of(
    name: str, facts: Mapping[str, Facts], local: Mapping[str, Any] | None = None, method: Method = _ADAPTERS
) -> Architecture | None:
    """The model's shape, by `model_config.config_of`; None where no formula counts it with this method."""
    return adapters.counted(families.from_config(model_config.config_of(name, facts, local) or {}), method)


def _workload(inputs: PlanInputs, machines: Machines, precision: str, shape: Architecture | None) -> Workload:
    """Everything that is known before the work is divided. The recipe is one of the built-in worker."""
    recipe, data, facts = inputs.recipe, inputs.data, machines.facts
    assert isinstance(recipe, TrainRecipe)
    profiles, warnings = speed_profiles.usable(recipe, machines.nodes, facts, machines.device, precision)
    rows = dataset_size.of_data(recipe, _file("train", data, facts), profiles.values())
    rows = replace(rows, padded=attention.why_padded(recipe, facts))
    held_out_rows = None
    if recipe.data.eval is not None:
        held_out = _file("eval", data, facts)
        held_out_rows = (held_out.rows if held_out else None) or 0
    elif recipe.data.eval_fraction > 0:
        held_out_rows = round((rows.count or 0) * recipe.data.eval_fraction)
    speeds = speed_estimate.estimate_speeds(
        recipe, machines, Guessing(precision, shape, inputs.measured_cards.rows), rows.tokens_mean, profiles
    )
    return Workload(speeds, rows, held_out_rows, (*warnings, *inputs.measured_cards.refused))


def _file(role: str, data: Mapping[str, DataFile], facts: Mapping[str, Facts]) -> DataFile | None:
    """The file that is shipped, or the facts of the first node that has it."""
    if role in data:
        return data[role]
    for node in facts.values():
        if role in node.data and node.data[role].found:
            file = node.data[role]
            return DataFile(file.size_bytes, file.rows, file.sha256)
    return None
