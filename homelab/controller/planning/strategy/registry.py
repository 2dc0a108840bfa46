"""The strategies that this version trains with, and the choice between them: candidates, feasible ones, the cheapest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.memory.rank_memory import STATE
from homelab.controller.planning.memory.scenario import DoesNotFit, NodesWithoutRoom
from homelab.controller.planning.strategy.base import Assignment, Strategy
from homelab.controller.planning.strategy.ddp import Ddp
from homelab.controller.planning.strategy.pipeline.pipeline import Pipeline
from homelab.controller.planning.strategy.sharded import Fsdp, Hsdp, Zero2, Zero3
from homelab.controller.planning.types import Choice, Plan, StrategyCost, TimeEstimate
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.shared.recipe import parallel

STRATEGIES: dict[str, Strategy] = {}


@dataclass(frozen=True)
class Selection:
    """The chosen strategy with its assignment, its time (None: not known, or a script) and the reason. `prices`: of all strategies."""

    strategy: Strategy
    assignment: Assignment
    time: TimeEstimate | None
    choice: Choice
    prices: tuple[StrategyCost, ...] = ()


def register(strategy: Strategy) -> None:
    """Make a strategy known to the planner; recipes may name it from now on."""
    STRATEGIES[strategy.name] = strategy
    if strategy.name not in parallel.STRATEGY_NAMES:
        parallel.STRATEGY_NAMES.append(strategy.name)


def of_plan(plan: Plan) -> Strategy:
    """The strategy of a plan that was made; in a plan of another version it may have a name that is not known: every rank holds the whole model then."""
    return STRATEGIES.get(plan.strategy, STRATEGIES["ddp"])


def useless_nodes(job: Job) -> NodesWithoutRoom | None:
    """The nodes without which one of the candidates may train this job; None where that is not what is wrong."""
    return next((fault for strategy in _candidates(job) if (fault := strategy.useless_nodes(job)) is not None), None)


def choose_strategy(job: Job) -> Selection:
    """The cheapest strategy that can train this job. Raises why none can."""
    attempts = {strategy.name: (strategy, strategy.feasible(job)) for strategy in _priced(job)}
    candidates = _candidates(job)
    feasible = [_costed(job, *attempts[one.name]) for one in candidates if isinstance(attempts[one.name][1], Assignment)]
    first = [attempts[one.name][1] for one in candidates if one.automatic(job) == "first"]
    # The others are there for want of memory alone: what else is wrong with all of the first ones is said.
    is_wrong = bool(first) and all(isinstance(result, HomelabError) and not isinstance(result, DoesNotFit) for result in first)
    if not feasible or is_wrong:
        raise _refusal([result for one in candidates if isinstance(result := attempts[one.name][1], HomelabError)])
    best = _cheapest(_with_room(job, feasible))
    if not isinstance(job, TrainingJob) or len(attempts) == 1:
        return best
    return dataclasses.replace(best, prices=tuple(_price(job, strategy, result) for strategy, result in attempts.values()))


def _refusal(errors: Sequence[HomelabError]) -> HomelabError:
    """Why the job cannot be trained: the first candidate's reason, or where that is memory, the one of a cut model, which needs least of it."""
    of_cuts = [error for error in errors if isinstance(error, DoesNotFit) and error.scenario.lacking_of_cut is not None]
    return of_cuts[0] if of_cuts and isinstance(errors[0], DoesNotFit) else errors[0]


def _candidates(job: Job) -> list[Strategy]:
    """The strategy that the recipe names, or with "auto" those that are automatic for this job."""
    name = job.recipe.parallel.strategy
    if name == "auto":
        return [strategy for strategy in STRATEGIES.values() if strategy.automatic(job) != "never"]
    return [STRATEGIES[name]]


def _priced(job: Job) -> list[Strategy]:
    """Those whose price is worth knowing: the candidates, and for several ranks of a training all of them, each once."""
    if not isinstance(job, TrainingJob) or job.machines.world_size == 1:
        return _candidates(job)
    return [strategy for strategy in STRATEGIES.values() if strategy.name != "fsdp" or job.recipe.parallel.strategy == "fsdp"]


def _with_room(job: Job, feasible: list[Selection]) -> list[Selection]:
    """Of several, those that are considered first; the others only where none of these has room on every rank."""
    first = [one for one in feasible if one.strategy.automatic(job) == "first"]
    if not first or len(feasible) == len(first) or any(_has_room(one.assignment) for one in first):
        return first or feasible
    roomy = [one for one in feasible if _has_room(one.assignment)]
    return roomy or first


def _has_room(assignment: Assignment) -> bool:
    return all(rank.token_cap is None and (rank.memory is None or rank.memory.fits is not False) for rank in assignment.ranks)


def _costed(job: Job, strategy: Strategy, assignment: Assignment | HomelabError) -> Selection:
    assert isinstance(assignment, Assignment)
    time = strategy.seconds(job, assignment.ranks) if isinstance(job, TrainingJob) else None
    return Selection(strategy, assignment, time, Choice(subject="strategy", value=strategy.name, because=strategy.because(job)))


def _cheapest(feasible: Sequence[Selection]) -> Selection:
    """The one with the shortest step; the first where no time is known. The reason names the others."""
    best = min(feasible, key=lambda one: one.time.step_s if one.time else float("inf"))
    others = [f"{one.strategy.name} would take {one.time.step_s:.3g} s per step" for one in feasible if one is not best and one.time]
    if not others:
        return best
    choice = best.choice.model_copy(update={"because": "; ".join([best.choice.because, *others])})
    return dataclasses.replace(best, choice=choice)


def _price(job: TrainingJob, strategy: Strategy, result: Assignment | HomelabError) -> StrategyCost:
    """What this strategy costs, or why it cannot be."""
    if isinstance(result, HomelabError):
        return StrategyCost(name=strategy.name, refused=result.message)
    time = strategy.seconds(job, result.ranks)
    held = [sum(item.size_bytes for item in rank.memory.items if item.name in STATE) for rank in result.ranks if rank.memory is not None]
    short = [rank.node for rank in result.ranks if rank.token_cap is not None or (rank.memory is not None and rank.memory.fits is False)]
    return StrategyCost(
        name=strategy.name, state_bytes=max(held, default=None), without_room=tuple(dict.fromkeys(short)), sent_bytes=_sent_bytes(job, strategy, result),
        wire_s=time.wire_s if time else None, step_s=time.step_s if time else None, tokens_per_s=time.tokens_per_s if time else None,
    )  # fmt: skip


def _sent_bytes(job: TrainingJob, strategy: Strategy, assignment: Assignment) -> int | None:
    """What a rank sends in a step: as many bytes as would take that many seconds at a byte per second."""
    passes = [-(-rank.share // rank.micro_batch) for rank in assignment.ranks if rank.share and rank.micro_batch]
    size_bytes = strategy.step_bytes(job, max(passes, default=1))
    return None if size_bytes is None else round(strategy.wire_s(size_bytes, len(assignment.ranks), 1.0))


for _strategy in (Ddp(), Zero2(), Zero3(), Fsdp(), Hsdp(), Pipeline()):
    register(_strategy)
