"""What a plan comes to: whether it can run, the first edit where it cannot, and the command that is next. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.controller.base.errors import HomelabError, MissingError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import gigabytes
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.memory import recipe_edits, scenario
from homelab.controller.planning.model import known_models, model_config
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.job import shape_of
from homelab.shared.recipe import Model


@dataclass(frozen=True)
class Verdict:
    """`runs`: True, False (or nobody knows, and it should be known), or None where it may. `seen`: why not; `edit`: what to do first; `command`:
    what is next."""

    runs: bool | None
    seen: str
    edit: str
    command: str
    is_judged: bool = True

    @property
    def title(self) -> str:
        """How it begins, for a person."""
        if not self.is_judged:
            return "Not judged"
        return "It cannot run" if self.runs is False else "It may run"

    @property
    def exit_code(self) -> int:
        """1 for a plan that cannot run, or that nobody can judge."""
        return int(self.runs is False)

    def as_dict(self) -> dict[str, str | bool | None]:
        """For programs."""
        return {"runs": self.runs, "seen": self.seen, "edit": str(self.edit)}


def of(
    plan: Plan, recipe: Recipe, blocked: HomelabError | None = None, *, inputs: PlanInputs | None = None, others: Sequence[str] = (), offline: bool = False
) -> Verdict:  # fmt: skip
    """The verdict on a plan of this recipe. `blocked`: what of the recipe's files cannot be read on this machine; `inputs`: what it was planned from;
    `others`: names of models that are on this machine."""
    if blocked is not None:
        # A plan may come before its data.
        return Verdict(
            None if isinstance(blocked, MissingError) else False, f"{blocked.message}: {blocked.where}", blocked.hint, "preflight"
        )
    lacking = lack_of_memory(plan, recipe, inputs)
    if lacking is not None:
        return lacking
    if isinstance(recipe, TrainRecipe) and plan.ranks and all(rank.memory is None for rank in plan.ranks):
        facts, local = (inputs.facts, inputs.config) if inputs is not None else ({}, None)
        # A strategy may reckon no memory, though the model is known.
        if shape_of(recipe.model.name, facts, local, recipe.method) is None:
            near = known_models.near(recipe.model.name, others)
            return _not_judged(recipe.model, model_config.config_of(recipe.model.name, facts, local), near, offline)
    return Verdict(True, "", "", "launch")


def _not_judged(model: Model, config: Mapping[str, Any] | None, near: str, offline: bool) -> Verdict:
    """The verdict where neither memory nor time is known, by what is known of the model."""
    meant = f'edit the recipe: [model] name = "{near}" (did you mean that?); or ' if near else ""
    by_nodes = homelab("plan RECIPE") if offline else homelab("setup --recipe RECIPE")
    if config is not None:
        why = model_config.why_no_formula(config)
        edit = (
            Hint("a node tries it without its weights: {}", by_nodes)
            if offline
            else Hint("a node that has the model tries it: {}, then plan again", by_nodes)
        )
    elif model.is_folder:
        why = "is a folder that this machine does not have"
        edit = Hint(
            "{}copy its config.json to {} on this machine; or ask the nodes: {}",
            meant,
            f"{model.name.rstrip('/')}/config.json",
            homelab("preflight RECIPE"),
        )
    else:
        why = "is a name whose shape homelab does not know"
        edit = Hint("{}is [model] name right, org/name as on the hub? The nodes ask the hub: {}", meant, homelab("preflight RECIPE"))
    # A folder may lie on the nodes alone, which nobody asked; a name of the hub is the person's to check.
    is_open = offline and model.is_folder and config is None
    return Verdict(
        None if is_open else False, f"{model.name} {why}, so neither memory nor time is known", edit, "preflight", is_judged=False
    )


def lack_of_memory(plan: Plan, recipe: Recipe | None = None, inputs: PlanInputs | None = None) -> Verdict | None:
    """The verdict on a plan in which a rank has no room; None where all have, or nobody knows. With what it was planned from, the edit is one that makes all
    ranks fit."""
    lacking = [rank for rank in plan.ranks if rank.memory is not None and rank.memory.fits is False]
    if not lacking:
        return None
    rank, memory = lacking[0], lacking[0].memory
    assert memory is not None and memory.available_bytes is not None
    short = gigabytes(memory.total_bytes - memory.available_bytes)
    edit = _edit_that_fits(plan, recipe, inputs) if isinstance(recipe, TrainRecipe) and inputs is not None else None
    if edit is None:
        edit = f"[parallel] micro_batch = {max(1, rank.micro_batch // 2)}" if rank.micro_batch > 1 else None
    others = [name for name in dict.fromkeys(one.node for one in plan.ranks) if name not in {one.node for one in lacking}]
    without = f"leave {rank.node} out: --nodes {','.join(others)}" if others else "take a smaller model, or add a machine with more memory"
    first = f"edit the recipe: {edit}" if edit else without
    return Verdict(False, f"rank {rank.rank} on {rank.node} lacks {short} GB", f"{first}; or see what fits", "plan --fit")


def _edit_that_fits(plan: Plan, recipe: TrainRecipe, inputs: PlanInputs) -> str | None:
    """The smallest edit after which every rank has room; None where nobody knows one."""
    config = model_config.config_of(recipe.model.name, inputs.facts, inputs.config)
    shape = shape_of(recipe.model.name, inputs.facts, inputs.config, recipe.method)
    if shape is None or registry.of_plan(plan).ways_to_room(plan):
        return None
    held = model_config.as_held(recipe, config)
    memory = scenario.of_plan(plan, shape, inputs.facts)
    ways = recipe_edits.fixes(held, memory) if memory is not None else ()
    if not ways:
        return None
    choice = ', or "auto"' if [edit.key for edit in ways[0].edits] == ["micro_batch"] else ""
    return f"{' and '.join(map(str, ways[0].edits))}{choice}"
