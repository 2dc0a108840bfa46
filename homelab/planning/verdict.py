"""What a plan comes to: whether it can run, the first edit where it cannot, and the command that is next. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.config.recipe import Recipe, TrainRecipe
from homelab.errors import HomelabError
from homelab.planning.inputs import PlanInputs
from homelab.planning.job import shape_of
from homelab.planning.memory import known_models
from homelab.planning.types import Plan
from homelab.text.hint import Hint, homelab
from homelab.text.units import gigabytes


@dataclass(frozen=True)
class Verdict:
    """`runs`: True, False, or None where it cannot be judged. `seen` is why it does not, or is not known to, `edit` what to do first, `command` what is next."""

    runs: bool | None
    seen: str
    edit: str
    command: str

    @property
    def exit_code(self) -> int:
        """1 for a plan that cannot run."""
        return int(self.runs is False)


def of(plan: Plan, recipe: Recipe, blocked: HomelabError | None = None, *, inputs: PlanInputs | None = None, offline: bool = False) -> Verdict:
    """The verdict on a plan of this recipe. `blocked`: what of the recipe's files cannot be read on this machine; `inputs`: what it was planned
    from."""
    if blocked is not None:
        is_missing = "not there" in blocked.message  # a plan may come before its data
        return Verdict(None if is_missing else False, f"{blocked.message}: {blocked.where}", blocked.hint, "preflight")
    lacking = lack_of_memory(plan)
    if lacking is not None:
        return lacking
    # A strategy may reckon no memory, though the model is known.
    is_unknown = isinstance(recipe, TrainRecipe) and shape_of(recipe.model.name, inputs.facts if inputs else {}, inputs.config if inputs else None) is None
    if isinstance(recipe, TrainRecipe) and is_unknown and plan.ranks and all(rank.memory is None and rank.stage is None for rank in plan.ranks):
        name = recipe.model.name
        where = "a folder that this machine does not have" if recipe.model.is_folder else f"not a name that homelab has a shape for{known_models.near(name)}"
        edit = Hint("is [model] name right? The nodes can say: {}", homelab("preflight RECIPE"))
        # A folder may lie on the nodes alone, which nobody asked; a name of the hub is the person's to check.
        is_open = offline and recipe.model.is_folder
        return Verdict(None if is_open else False, f"cannot be judged: {name} is {where}, so neither memory nor time is known", edit, "preflight")
    return Verdict(True, "", "", "launch")


def lack_of_memory(plan: Plan) -> Verdict | None:
    """The verdict on a plan in which a rank has no room; None where all have, or nobody knows."""
    lacking = [rank for rank in plan.ranks if rank.memory is not None and rank.memory.fits is False]
    if not lacking:
        return None
    rank, memory = lacking[0], lacking[0].memory
    assert memory is not None and memory.available_bytes is not None
    short = gigabytes(memory.total_bytes - memory.available_bytes)
    smaller = f"edit the recipe: [parallel] micro_batch = {max(1, rank.micro_batch // 2)}" if rank.micro_batch > 1 else f"leave {rank.node} out with --nodes"
    return Verdict(False, f"rank {rank.rank} on {rank.node} lacks {short} GB", f"{smaller}; or see what fits", "plan --fit")
