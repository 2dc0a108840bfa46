"""How a training scales: the same recipe, planned for 1, 2, 3 ... machines. Pure.

First come the machines that are there, fastest first, then copies of one of them. Every point is a whole plan, with the strategy that the planner
takes for so many ranks; the wire of more ranks than were measured is scaled by that strategy's own rule (`Strategy.wire_s`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.types import Plan, TimeEstimate
from homelab.controller.planning.work.speed_estimate import MEASURED

MOST_MACHINES = 64
LEAST_GAIN = 0.05  # of tokens per second, for each machine more: below it, it does not pay
_OPTION = "--what-if-nodes"
_RANGE = re.compile(r"(\d{1,6})\s*\.\.\s*(\d{1,6})")
_LIST = re.compile(r"\d{1,6}(?:\s*,\s*\d{1,6})*")

Basis = Literal["measured", "scaled", "guess"]
"""measured: speeds and wire, of these very machines. scaled: from what was measured on other machines or another number of ranks. guess: partly by data sheets,
an assumed wire or assumed lengths of rows."""


class ScalingPoint(Value):
    """So many machines; `nodes` in the order in which they come, of which the last `copies` are copies.

    `gain`: tokens per second that each machine more has brought since the point before, as a part. `limit`: what costs most of a step.
    Where there is no plan, `error` says why, and no figure is known. `fits` as in a plan: None where some card's memory is not known.
    """

    machines: int
    nodes: tuple[str, ...]
    copies: int
    ranks: int | None = None
    strategy: str | None = None
    global_batch: int | None = None
    step_s: float | None = None
    wire_s: float | None = None
    tokens_per_s: float | None = None
    hours: float | None = None
    efficiency: float | None = None
    gain: float | None = None
    basis: Basis | None = None
    limit: str | None = None
    fits: bool | None = None
    error: str | None = None

    @property
    def is_usable(self) -> bool:
        """Whether so many machines could train, and how fast is known."""
        return self.tokens_per_s is not None and self.fits is not False


class ScalingCurve(Value):
    """The points in growing order. `turn`: the number of machines after which none pays; None where all do. `because`: that, in a sentence."""

    like: str
    like_because: str
    points: tuple[ScalingPoint, ...]
    turn: int | None
    because: str
    notes: tuple[str, ...] = ()


def parse_counts(text: str) -> tuple[int, ...]:
    """Read "1..10" or "2,4,8". Raises InputError for anything else, and for numbers that no plan can be made of."""
    span, listed = _RANGE.fullmatch(text.strip()), _LIST.fullmatch(text.strip())
    if span is None and listed is None:
        raise InputError(
            f'"{text}" is not a number of machines', where=_OPTION, hint=f"{_OPTION} 1..10 (each number), or {_OPTION} 2,4,8 (these)"
        )
    first, last = (int(span[1]), int(span[2])) if span else (0, 0)
    if span and first > last:
        raise InputError(f'"{text}" begins with more machines than it ends with', where=_OPTION, hint=f"{_OPTION} {last}..{first}")
    asked = {first, last} if span else set(map(int, text.split(",")))
    counts = range(first, min(last, MOST_MACHINES) + 1) if span else sorted(asked)
    good = [count for count in counts if 1 <= count <= MOST_MACHINES]
    edit = f"{good[0]}..{good[-1]}" if span and good else ",".join(map(str, good)) or f"1..{MOST_MACHINES}"
    if min(asked) < 1:
        raise InputError("a training needs at least one machine", where=f"{_OPTION} {text}", hint=f"{_OPTION} {edit}")
    if max(asked) > MOST_MACHINES:
        raise InputError(
            f"more than {MOST_MACHINES} machines: measurements of a few machines say nothing about so many, and each number needs its own plan",
            where=f"{_OPTION} {text}", hint=f"{_OPTION} {edit}",
        )  # fmt: skip
    return tuple(counts)


def curve(
    inputs: PlanInputs, counts: Sequence[int], make: Callable[[PlanInputs], Plan], *, like: str | None = None, is_wire_assumed: bool = False
) -> ScalingCurve:
    """The plans of so many machines. `like` is the node that is copied; by default the middle one by speed.

    Raises InputError for a node that is not there, and where the speed of no number of machines is known.
    """
    names = [node.name for node in inputs.cluster.nodes]
    if like is not None and like not in names:
        raise InputError(
            f'no node is named "{like}".{did_you_mean(like, names)}', where=f"--like {like}", hint=f"the nodes are: {', '.join(names)}"
        )
    recipe, notes = _for_any_machines(inputs.recipe)
    fleet = _fleet_of(replace(inputs, recipe=recipe), make, like)
    points: list[ScalingPoint] = []
    for count in counts:
        before = next((point for point in reversed(points) if point.is_usable), None)
        points.append(_point(fleet, count, make, before, is_wire_assumed=is_wire_assumed))
    if not any(point.tokens_per_s for point in points):
        raise InputError(
            f"there is no curve: {next((point.error for point in points if point.error), 'nothing is known of the speed of these machines')}", where=_OPTION,
            hint=Hint("a run measures their speed in its first steps ({}); or set `speed` of every node in cluster.toml", homelab("launch", "RECIPE")),
        )  # fmt: skip
    turn, because = _turn([point for point in points if point.is_usable])
    return ScalingCurve(like=fleet.like, like_because=fleet.because, points=tuple(points), turn=turn, because=because, notes=tuple(notes))


def _for_any_machines(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe without what names machines or their number."""
    notes = []
    recovery = replace(recipe.recovery, min_nodes=1)
    changes: dict[str, object] = {"recovery": recovery}
    if not isinstance(recipe.parallel.shares, str):
        changes["parallel"] = replace(recipe.parallel, shares="auto")
        notes.append("[parallel] shares has no entry for a copy: the curve uses shares by speed")
    return recipe.model_copy(update=changes), notes


@dataclass(frozen=True)
class _Fleet:
    """The machines in the order in which they come, and the one that is copied after them."""

    inputs: PlanInputs
    order: tuple[str, ...]
    like: str
    because: str

    def first(self, count: int) -> PlanInputs:
        """What a plan of so many machines is made from. Those that are there stand as in cluster.toml, copies behind them."""
        cluster, existing = self.inputs.cluster, self.order[:count]
        nodes = [node for node in cluster.nodes if node.name in existing]
        facts = {name: self.inputs.facts[name] for name in existing if name in self.inputs.facts}
        throughputs = dict(self.inputs.throughputs)
        copied, taken = cluster.node(self.like), {node.name for node in cluster.nodes}
        for number in range(1, count - len(existing) + 1):
            name = next(one for one in (f"{self.like}-copy-{number}", f"{self.like}.copy.{number}") if one not in taken)
            # Of a network that is kept for examples (RFC 5737): no connection is ever made to it.
            update = {"name": name, "host": f"198.51.100.{number}", "lan_address": f"198.51.100.{number}", "interface": "lan"}
            nodes.append(copied.model_copy(update=update))
            if self.like in self.inputs.facts:
                facts[name] = self.inputs.facts[self.like].model_copy(update={"node": name})
            throughputs |= self._wires_of_copy(name, [node.name for node in nodes])
        left_out = (*cluster.left_out, *(name for name in self.order[count:]))
        return replace(
            self.inputs,
            cluster=cluster.model_copy(update={"nodes": tuple(nodes), "left_out": left_out}),
            facts=facts,
            throughputs=throughputs,
        )

    def _wires_of_copy(self, name: str, others: Sequence[str]) -> dict[tuple[str, str], float]:
        """As fast as the original's; between two of a kind as the slowest of those."""
        known = self.inputs.throughputs
        of_original = [rate for pair, rate in known.items() if self.like in pair]
        if not of_original:
            return {}
        slowest = min(of_original)
        pairs = [pair for other in others if other != name for pair in ((name, other), (other, name))]
        originals = [(self.like if source == name else source, self.like if target == name else target) for source, target in pairs]
        return {pair: known.get(original, slowest) for pair, original in zip(pairs, originals, strict=True)}


def _fleet_of(inputs: PlanInputs, make: Callable[[PlanInputs], Plan], like: str | None) -> _Fleet:
    names = [node.name for node in inputs.cluster.nodes]
    try:
        plan = make(inputs)
    except InputError:  # all of them together cannot train; fewer, or more, may
        order = names
    else:
        alone = dict.fromkeys((node.name for node in plan.nodes), 0.0)
        for rank in plan.time.ranks if plan.time else ():
            alone[rank.node] += rank.alone_tokens_per_s
        order = sorted(alone, key=lambda name: -alone[name])
    if like is not None and like not in order:
        raise InputError(
            f"{like} takes no part in the training, so a copy cannot be planned",
            where=f"--like {like}",
            hint=f"take part: {', '.join(order)}",
        )
    if like is not None:
        return _Fleet(inputs, tuple(order), like, "--like names it")
    middle = order[len(order) // 2]
    because = (
        "the only one"
        if len(order) == 1
        else "the slower of the two"
        if len(order) == 2
        else f"the middle one of {len(order)} by speed; --like NODE chooses another"
    )
    return _Fleet(inputs, tuple(order), middle, because)


def _point(
    fleet: _Fleet, count: int, make: Callable[[PlanInputs], Plan], before: ScalingPoint | None, *, is_wire_assumed: bool
) -> ScalingPoint:
    inputs = fleet.first(count)
    copies = [node.name for node in inputs.cluster.nodes[len(fleet.order[:count]) :]]
    bare = ScalingPoint(machines=count, nodes=(*fleet.order[:count], *copies), copies=len(copies))
    try:
        plan = make(inputs)
    except InputError as error:
        return bare.model_copy(update={"error": error.message})
    known = {"ranks": plan.world_size, "strategy": plan.strategy, "global_batch": sum(rank.share for rank in plan.ranks), "fits": plan.fits}
    time = plan.time
    if time is None:
        return bare.model_copy(update=known)
    gain = (time.tokens_per_s / before.tokens_per_s) ** (1 / (count - before.machines)) - 1 if before and before.tokens_per_s else None
    return bare.model_copy(update={
        **known, "step_s": time.step_s, "wire_s": time.wire_s, "tokens_per_s": time.tokens_per_s, "hours": time.hours, "efficiency": time.efficiency,
        "gain": gain, "basis": _basis(inputs, time, is_copied=bare.copies > 0, is_wire_assumed=is_wire_assumed), "limit": _limit(plan, time),
    })  # fmt: skip


def _basis(inputs: PlanInputs, time: TimeEstimate, *, is_copied: bool, is_wire_assumed: bool) -> Basis:
    wire = network_cost.wire_between([node.name for node in inputs.cluster.nodes], inputs.throughputs)
    if not time.is_measured or (time.wire_s and not time.wire_measured_ranks and not wire.is_measured):
        return "guess"
    is_whole = time.wire_is_measured and all(rank.source == MEASURED for rank in time.ranks)
    return "measured" if is_whole and not is_copied and not (is_wire_assumed and time.wire_s) else "scaled"


def _limit(plan: Plan, time: TimeEstimate) -> str:
    """What costs most of a step beside the computing itself, of all cards at their speed alone."""
    best_compute_s = time.best_step_s - time.wire_s - time.wait_s
    rows = sum(rank.share for rank in plan.ranks)
    uneven = (
        f"rows per batch: {rows} rows cannot be shared evenly by {plan.world_size} ranks of these speeds" if plan.balance == "measured"
        else "the slowest rank: the shares are fixed, so all wait for it"
    )  # fmt: skip
    costs = {
        "the wire": time.wire_s, "ranks that wait for each other, as measured in earlier runs": time.wait_s, uneven: time.compute_s - best_compute_s,
        "stages that fill and drain once per step": time.fill_s,
        "the fixed cost of each step and pass on a rank": best_compute_s - time.step_s * time.efficiency,
    }  # fmt: skip
    worst = max(costs, key=lambda name: costs[name])
    part = costs[worst] / time.step_s
    return f"{worst} ({part:.0%} of the step)" if part >= 0.01 else "nothing"


def _turn(points: Sequence[ScalingPoint]) -> tuple[int | None, str]:
    """The first point from which no later one brings `LEAST_GAIN` for each machine more, and what limits the next one."""
    if not points:
        return None, "the training does not fit on any number of these machines"
    for place, point in enumerate(points[:-1]):
        later = points[place + 1 :]
        rates = [(one.tokens_per_s or 0) / (point.tokens_per_s or 1) for one in later]
        if all(rate < (1 + LEAST_GAIN) ** (one.machines - point.machines) for rate, one in zip(rates, later, strict=True)):
            if later[0].limit == "nothing":
                return (
                    point.machines,
                    f"after {point.machines} another machine adds less than {LEAST_GAIN:.0%}, because there are so many already",
                )
            return (point.machines, f"after {point.machines} another machine adds less than {LEAST_GAIN:.0%}; the limit: {later[0].limit}")
    last = points[-1]
    return None, f"up to {last.machines} every machine helps ({LEAST_GAIN:.0%} or more for each); the largest cost there: {last.limit}"
