"""fit: what every rank will hold at its peak, against the memory that is free on its card or machine. The plan's own estimate, judged."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import decimal_size
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning import fit
from homelab.planning.memory import HELD
from homelab.planning.model import MemoryEstimate, Plan, RankPlan
from homelab.planning.ranks import shape_of

# Of the estimate. What it rests on least, CUDA's context and the allocator's gaps, is a few hundredths of a card.
TOLERANCE = 0.05


def memory(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """fail where a rank does not fit, warn where it does by less than the estimate is worth and nothing smaller can be chosen."""
    if isinstance(evidence.refused, fit.DoesNotFit):
        yield from _nowhere(evidence, evidence.refused)
    elif evidence.plan is not None:
        for rank in evidence.plan.ranks:
            yield from ((rank.node, problem) for problem in _of_rank(evidence, evidence.plan, rank))


def _nowhere(evidence: Evidence, refused: fit.DoesNotFit) -> Iterator[tuple[str, Problem]]:
    """The plan was refused: no rank has room for one row."""
    assert evidence.recipe is not None
    for place in refused.situation.places:
        need = fit.needed_bytes(evidence.recipe, refused.situation, place) - place.held_bytes
        free = place.available_bytes - place.held_bytes
        yield (
            place.node,
            Problem(
                "fail", f"rank {place.rank} needs {decimal_size(need)}, {decimal_size(free)} are free", refused.hint
            ),
        )


def _of_rank(evidence: Evidence, plan: Plan, rank: RankPlan) -> Iterator[Problem]:
    if rank.memory is None or rank.memory.available_bytes is None:
        return
    need, free = _need_and_free(rank.memory)
    said = f"rank {rank.rank} needs about {decimal_size(need)}"
    if rank.memory.fits is False:
        message = f"{said}, {decimal_size(free)} are free: {decimal_size(need - free)} too little"
        yield Problem("fail", message, _mending(evidence, plan, rank))
    elif free - need < TOLERANCE * need and rank.token_cap is None and not _chosen_to_fill(evidence, rank):
        message = f"{said} of {decimal_size(free)} that are free: less room than the estimate is worth"
        yield Problem("warn", message, _mending(evidence, plan, rank))


def _chosen_to_fill(evidence: Evidence, rank: RankPlan) -> bool:
    """The micro-batch is the largest that fits, and could be smaller: that it fills the card is what was meant."""
    return rank.micro_batch > 1 and evidence.recipe is not None and evidence.recipe.parallel.micro_batch == "auto"


def _mending(evidence: Evidence, plan: Plan, rank: RankPlan) -> str:
    """The smallest edit of the recipe after which every rank fits, or the nodes on which it does already."""
    others = list(dict.fromkeys(other.node for other in plan.ranks if _fits(other) and other.node != rank.node))
    without = f"leave {rank.node} out: --nodes {','.join(others)}" if others else "take a smaller model"
    assert evidence.recipe is not None
    shape = shape_of(evidence.recipe.model.name, evidence.facts) if evidence.recipe.model else None
    situation = fit.of_plan(plan, shape, evidence.facts) if shape is not None else None
    ways = fit.mendings(evidence.recipe, situation) if situation is not None else ()
    if ways:
        return f"homelab plan RECIPE --fit writes a recipe that fits. Least: {ways[0]}; or {without}"
    return f"homelab plan RECIPE shows what it is made of; {without}" if _fits(rank) else without


def _fits(rank: RankPlan) -> bool:
    return rank.memory is None or rank.memory.fits is not False


def _need_and_free(memory: MemoryEstimate) -> tuple[int, int]:
    """What the rank itself will hold, and what others leave it."""
    held = sum(item.size_bytes for item in memory.items if item.name == HELD)
    return memory.total_bytes - held, (memory.available_bytes or 0) - held


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    ranks = [rank for rank in evidence.plan.ranks if rank.node == node.name] if evidence.plan is not None else []
    if not ranks:
        return "takes no part"
    return "; ".join(dict.fromkeys(_said(rank) for rank in ranks))


def _said(rank: RankPlan) -> str:
    if rank.memory is None or rank.memory.available_bytes is None:
        return "cannot be judged: the model's shape or the memory is not known"
    need, free = _need_and_free(rank.memory)
    text = f"{need / 1e9:.1f} of {free / 1e9:.1f} GB"
    return text if rank.token_cap is None else f"{text}, for rows of up to {rank.token_cap} tokens"


def _needs(evidence: Evidence) -> str | None:
    if evidence.recipe is None:
        return "needs a recipe: homelab preflight RECIPE"
    if evidence.recipe.model is None:
        return "the recipe's [script] brings its own"
    if evidence.plan is None and not isinstance(evidence.refused, fit.DoesNotFit):
        return f"there is no plan: {evidence.refused.message}" if evidence.refused is not None else "needs a plan"
    return None


SUBJECT = Subject(
    "fit",
    "the training fits into the memory that is free",
    (
        Check(
            "fit.memory",
            "every rank fits into the memory that is free on its card or machine",
            "fail",
            "plan",
            of_cluster=memory,
        ),
    ),
    _summary,
    _needs,
)
