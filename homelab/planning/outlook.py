"""What a plan knows of time: speeds and rows before the work is divided, seconds and hours after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning import attention, measured, network, rows, speeds, time, verdict
from homelab.planning.architecture import Architecture
from homelab.planning.model import Choice, RankPlan, TimeEstimate
from homelab.planning.rows import DataFile, Rows
from homelab.planning.speeds import Belief

Throughputs = Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class Outlook:
    """Speeds and rows. `held_out_rows`: rows of one evaluation, 0 where they are not counted, None where nothing is evaluated."""

    belief: Belief
    rows: Rows
    held_out_rows: int | None


def look(
    recipe: Recipe, nodes: Sequence[Node], facts: Mapping[str, Facts], device: str, precision: str, shape: Architecture | None,
    data: Mapping[str, DataFile], warnings: list[str],
) -> Outlook | None:  # fmt: skip
    """Everything that is known before the work is divided; None for a [script], whose work nobody knows."""
    if recipe.train is None or recipe.data is None:
        return None
    files, unused = measured.usable(recipe, nodes, facts, device, precision)
    warnings += unused
    found = replace(rows.of_data(recipe, _file("train", data, facts), files.values()), padded=attention.why_padded(recipe, facts))
    held_out = _file("eval", data, facts)
    held_out_rows = None
    if recipe.data.eval is not None:
        held_out_rows = (held_out.rows if held_out else None) or 0
    elif recipe.data.eval_fraction > 0:
        held_out_rows = round((found.count or 0) * recipe.data.eval_fraction)
    belief = speeds.believe(recipe, nodes, facts, device, precision, shape, found.tokens_mean, files)
    return Outlook(belief, found, held_out_rows)


def estimate(
    recipe: Recipe, outlook: Outlook, ranks: Sequence[RankPlan], shape: Architecture | None, precision: str,
    throughputs: Throughputs, resume_step: int, choices: list[Choice],
) -> TimeEstimate | None:  # fmt: skip
    """The time of these ranks; None, with the reason in `choices`, where nothing is known of their speeds."""
    found = time.estimate(
        recipe, ranks, outlook.belief, outlook.rows, shape=shape, throughputs=throughputs,
        held_out_rows=outlook.held_out_rows, resume_step=resume_step,
    )  # fmt: skip
    if found is None:
        choices.append(Choice(subject="time", value="not known", because=f"speeds: {outlook.belief.choice.because}"))
        return None
    choices.append(
        Choice(
            subject="rows",
            value=f"{outlook.rows.count or 'unknown'} of about {found.row_tokens:.0f} tokens",
            because=found.rows_because,
        )
    )
    if outlook.rows.padded:
        choices.append(Choice(subject="padding", value="rows are padded to the longest of their pass", because=outlook.rows.padded))
    choices.append(Choice(subject="wire", value=f"{found.wire_s:.2g} s per step", because=found.wire_because))
    wire = network.wire_between({rank.node for rank in ranks}, throughputs)
    return found.model_copy(update={"verdict": verdict.lines(recipe, shape, precision, ranks, found, wire)})


def _file(role: str, data: Mapping[str, DataFile], facts: Mapping[str, Facts]) -> DataFile | None:
    """The file that is shipped, or as the first node that has it says."""
    if role in data:
        return data[role]
    for known in facts.values():
        if role in known.data and known.data[role].found:
            file = known.data[role]
            return DataFile(file.size_bytes, file.rows, file.sha256)
    return None
