"""The nodes that a plan itself advises: its advice is followed until a plan has none. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.types import Plan


@dataclass(frozen=True)
class AdvisedPlan:
    """A plan on the nodes of `inputs`. `because`: why `left_out`, the others that were there, are not among them."""

    plan: Plan
    inputs: PlanInputs
    left_out: tuple[str, ...]
    because: str


def follow(inputs: PlanInputs, make: Callable[[PlanInputs], Plan]) -> AdvisedPlan:
    """The plan on all nodes, or on those that it advises. Each plan has fewer nodes than the one before, so there are at most as many as nodes.

    Where the advised nodes have no plan or no room, as with a [recovery] min_nodes above their number, the plan before them stays.
    Raises HomelabError as `make`.
    """
    plan, reasons, everybody = make(inputs), list[str](), inputs.cluster.nodes
    while True:
        names = plan.fewer.nodes if plan.fewer is not None else tuple(node.name for node in plan.nodes)
        if len(names) == len(inputs.cluster.nodes):
            break
        fewer = replace(inputs, cluster=inputs.cluster.only(names))
        try:
            on_fewer = make(fewer)
        except HomelabError:
            break
        if on_fewer.fits is False and plan.fits is not False:
            break
        reasons += [
            choice.because.partition(". ")[0]
            for choice in plan.choices
            if choice.value == "left out" and choice.subject in {f"node {name}" for name in plan.left_out}
        ]
        reasons += [plan.fewer.because] if plan.fewer is not None else []
        plan, inputs = on_fewer, fewer
    left_out = tuple(node.name for node in everybody if node not in inputs.cluster.nodes)
    return AdvisedPlan(plan, inputs, left_out, "; ".join(dict.fromkeys(reasons)))
