"""How much work a training is: the speeds of the machines and the rows of the data, before the work is divided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.memory import attention
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.speed import dataset_size, speed_profiles
from homelab.controller.planning.speed.dataset_size import DataFile, Rows
from homelab.controller.planning.work import speed_estimate
from homelab.controller.planning.work.speed_estimate import Guessing, SpeedEstimate


@dataclass(frozen=True)
class Workload:
    """Speeds and rows. `held_out_rows`: rows of one evaluation, 0 where they are not counted, None where nothing is evaluated."""

    speeds: SpeedEstimate
    rows: Rows
    held_out_rows: int | None
    warnings: tuple[str, ...] = ()


def estimate(inputs: PlanInputs, machines: Machines, precision: str, shape: Architecture | None) -> Workload:
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
