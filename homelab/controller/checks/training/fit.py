"""fit: what every rank will hold at its peak, against the memory that is free on its card or machine. The plan's own estimate, judged."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import decimal_size, gigabytes
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, lacks_model
from homelab.controller.checks.machine import runs as alive
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import recipe_edits, scenario
from homelab.controller.planning.memory_estimate import MemoryEstimate
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.types import Plan, RankPlan
from homelab.controller.planning.work.job import shape_of
from homelab.shared.protocol.memory_items import HELD

# Of the estimate. What it rests on least, CUDA's context and the allocator's gaps, is a few hundredths of a card.
TOLERANCE = 0.05


@check("fit.memory", "every rank fits into the free memory of its card or machine", worst="fail", sees="plan")
def memory(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail when a rank does not fit; warn when it fits by less than the error of the estimate and nothing smaller can be chosen."""
    if isinstance(evidence.refused, scenario.DoesNotFit):
        yield from _nowhere(evidence, evidence.refused)
    elif evidence.plan is not None:
        for rank in evidence.plan.ranks:
            yield from ((rank.node, problem) for problem in _of_rank(evidence, evidence.plan, rank))


def _nowhere(evidence: Evidence, refused: scenario.DoesNotFit) -> Iterator[tuple[str, Problem]]:
    """The plan was refused: no rank has room for one row."""
    assert isinstance(evidence.recipe, TrainRecipe)
    for place in refused.scenario.ranks:
        need = scenario.needed_bytes(evidence.recipe, refused.scenario, place) - place.held_bytes
        free = place.available_bytes - place.held_bytes
        yield (place.node, Problem("fail", f"rank {place.rank} needs {decimal_size(need)}, {decimal_size(free)} are free", refused.hint))


def _of_rank(evidence: Evidence, plan: Plan, rank: RankPlan) -> Iterator[Problem]:
    if rank.memory is None or rank.memory.available_bytes is None:
        return
    need, free = _need_and_free(rank.memory)
    needs = f"rank {rank.rank} needs about {decimal_size(need)}"
    if rank.memory.fits is False:
        message = f"{needs}, {decimal_size(free)} are free: {decimal_size(need - free)} too little"
        run = (
            next((run for run in facts.runs.alive if not alive.why_stale(facts, run)), "")
            if (facts := evidence.facts.get(rank.node))
            else ""
        )
        if facts is not None and run and need <= rank.memory.available_bytes:
            words = alive.what_it_does(evidence, evidence.cluster.node(rank.node), facts, run)
            yield Problem("warn", f"{message}; run {run} {words}", Hint("start after it: {}", alive.after(run)), is_busy=True)
            return
        yield Problem("fail", message, _fix(evidence, plan, rank))
    elif free - need < TOLERANCE * need and rank.token_cap is None and not _chosen_to_fill(evidence, rank):
        message = f"{needs} of {decimal_size(free)} that are free: closer than the error of the estimate"
        yield Problem("warn", message, _fix(evidence, plan, rank))


def _chosen_to_fill(evidence: Evidence, rank: RankPlan) -> bool:
    """The micro-batch is the largest that fits, and could be smaller: that it fills the card is what was meant."""
    return rank.micro_batch > 1 and evidence.recipe is not None and evidence.recipe.parallel.micro_batch == "auto"


def _fix(evidence: Evidence, plan: Plan, rank: RankPlan) -> str:
    """The smallest edit of the recipe after which every rank fits, or the nodes on which it does already."""
    if ways := registry.of_plan(plan).ways_to_room(plan):
        return Hint("{} shows the items; {}", homelab("plan RECIPE"), ways)
    others = list(dict.fromkeys(other.node for other in plan.ranks if _fits(other) and other.node != rank.node))
    without = f"leave {rank.node} out: --nodes {','.join(others)}" if others else "take a smaller model"
    assert isinstance(evidence.recipe, TrainRecipe)
    shape = shape_of(evidence.recipe.model.name, evidence.facts, method=evidence.recipe.method)
    memory = scenario.of_plan(plan, shape, evidence.facts) if shape is not None else None
    edits = recipe_edits.fixes(evidence.recipe, memory) if memory is not None else ()
    if edits:
        return Hint("{} writes a recipe that fits. Least: {}; or {}", homelab("plan RECIPE --fit"), edits[0], without)
    return Hint("{} shows the items; {}", homelab("plan RECIPE"), without) if _fits(rank) else without


def _fits(rank: RankPlan) -> bool:
    return rank.memory is None or rank.memory.fits is not False


def _need_and_free(memory: MemoryEstimate) -> tuple[int, int]:
    """What the rank itself will hold, and what others leave it."""
    held_bytes = sum(item.size_bytes for item in memory.items if item.name == HELD)
    return memory.total_bytes - held_bytes, (memory.available_bytes or 0) - held_bytes


def _needs(evidence: Evidence) -> str | None:
    missing = lacks_model(evidence)
    if missing is None and evidence.plan is None and not isinstance(evidence.refused, scenario.DoesNotFit):
        return f"there is no plan: {evidence.refused.message}" if evidence.refused is not None else "needs a plan"
    return missing


@subject("fit", "the training fits into the free memory", after="collective", needs=_needs)
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    ranks = [rank for rank in evidence.plan.ranks if rank.node == node.name] if evidence.plan is not None else []
    if not ranks:
        return "takes no part"
    return "; ".join(dict.fromkeys(_sentence(rank) for rank in ranks))


def _sentence(rank: RankPlan) -> str:
    if rank.memory is None or rank.memory.available_bytes is None:
        return "cannot be judged: the model's shape or the memory is not known"
    need, free = _need_and_free(rank.memory)
    text = f"{gigabytes(need)} of {gigabytes(free)} GB"
    return text if rank.token_cap is None else f"{text}, for rows of up to {rank.token_cap} tokens"
