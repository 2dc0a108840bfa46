"""The strategies that this version trains with, and the choice between them: candidates, feasible ones, the cheapest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from homelab.config.recipe import parallel
from homelab.errors import HomelabError, InputError
from homelab.planning.job import Job, TrainingJob
from homelab.planning.strategy import network_cost
from homelab.planning.strategy.base import Assignment, Strategy
from homelab.planning.strategy.ddp import Ddp
from homelab.planning.types import Choice, TimeEstimate

STRATEGIES: dict[str, Strategy] = {}


@dataclass(frozen=True)
class Selection:
    """The chosen strategy with its assignment, its time (None: not known, or a script) and the reason."""

    strategy: Strategy
    assignment: Assignment
    time: TimeEstimate | None
    choice: Choice


def register(strategy: Strategy) -> None:
    """Make a strategy known to the planner; recipes may name it from now on."""
    STRATEGIES[strategy.name] = strategy
    if strategy.name not in parallel.STRATEGY_NAMES:
        parallel.STRATEGY_NAMES.append(strategy.name)


def choose_strategy(job: Job) -> Selection:
    """The cheapest strategy that can train this job. Raises the first candidate's error where none can."""
    attempts = [(strategy, strategy.feasible(job)) for strategy in candidates(job)]
    feasible = [_costed(job, strategy, result) for strategy, result in attempts if isinstance(result, Assignment)]
    if not feasible:
        raise next(result for _, result in attempts if isinstance(result, HomelabError))
    return _cheapest(feasible)


def candidates(job: Job) -> tuple[Strategy, ...]:
    """The strategy that the recipe names, or with "auto" all. Raises InputError, with its price, for one that is not registered."""
    name = job.recipe.parallel.strategy
    if name == "auto":
        return tuple(STRATEGIES.values())
    if name in STRATEGIES:
        return (STRATEGIES[name],)
    price = ""
    if isinstance(job, TrainingJob) and job.shape is not None and len(job.machines.nodes) != 1:
        price = " " + network_cost.price_of_sharding(name, job, job.shape)
    raise InputError(
        f'strategy = "{name}" is not in this version: it trains with {" and ".join(STRATEGIES)} only.{price}',
        where="recipe, [parallel] strategy",
        hint='strategy = "auto"',
    )


def _costed(job: Job, strategy: Strategy, assignment: Assignment) -> Selection:
    time = strategy.seconds(job, assignment.ranks) if isinstance(job, TrainingJob) else None
    return Selection(strategy, assignment, time, Choice(subject="strategy", value=strategy.name, because=strategy.because(job)))


def _cheapest(feasible: Sequence[Selection]) -> Selection:
    """The one with the shortest step; the first where no time is known. The reason names the others."""
    best = min(feasible, key=lambda one: one.time.step_s if one.time else float("inf"))
    others = [f"{one.strategy.name} would take {one.time.step_s:.3g} s per step" for one in feasible if one is not best and one.time]
    if not others:
        return best
    choice = best.choice.model_copy(update={"because": "; ".join([best.choice.because, *others])})
    return Selection(best.strategy, best.assignment, best.time, choice)


register(Ddp())
