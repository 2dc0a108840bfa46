"""One look at a cluster, judged: facts, dials, a sample of the data, the plan, the collective test. `preflight` shows it, `launch` refuses on it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from homelab.checks import collective as collective_checks
from homelab.checks import registry
from homelab.checks.evidence import Evidence, Finding
from homelab.config.recipe import Recipe
from homelab.control import collective, gather, sample
from homelab.control.material import Material
from homelab.errors import HomelabError, InputError
from homelab.planning import batch
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet

DEFAULT_PORT = 29500
Say = Callable[[str], None]


@dataclass(frozen=True)
class Look:
    """What was seen and what the checks make of it. `recipe` has its open batch settled; `refused` says why there is no plan."""

    evidence: Evidence
    findings: list[Finding]
    recipe: Recipe | None = None
    plan: Plan | None = None
    refused: HomelabError | None = None


def look(
    fleet: Fleet, recipe: Recipe | None, items: list[Material], *, skip: Collection[str], test_collective: collective_checks.When,
    plan_on: Callable[[Evidence, Recipe], Plan], say: Say = lambda text: None,
) -> Look:  # fmt: skip
    """Everything of one preflight. Raises nothing for a node that fails: that is a finding.

    `skip` holds ids of checks (`registry.skipped`): what only they would look at is not done either.
    """
    port = recipe.parallel.port if recipe else DEFAULT_PORT
    seen = gather.facts(fleet, recipe=recipe, material=items, port=port, say=say, deep=test_collective == "always")
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="sample") as pool:
        # The tokenizer takes seconds on one node while the dials keep all wires busy.
        sampled = None
        if recipe is not None and seen.facts and any(check.id not in skip for check in registry.CHECKS if check.sees == "sample"):
            sampled = pool.submit(sample.look, fleet, seen, recipe, items)
        seen = gather.with_links(fleet, seen, say=say)
        if sampled is not None:
            say("reading a sample of the data")
            seen = replace(seen, sample=sampled.result())
    plan, refused = None, None
    if recipe is not None and seen.facts:
        try:
            recipe, plan = batch.settle(recipe, lambda wanted: plan_on(seen, wanted))
        except HomelabError as error:
            refused = error
        seen = replace(seen, plan=plan, refused=refused)
    if collective_checks.wanted(seen, skip, test_collective):
        try:
            result = collective.run(fleet, seen, say)
        except InputError as error:  # without a recipe nobody has tried to plan before
            refused = error
        else:
            seen = replace(seen, collective=result)
            collective.keep(fleet, seen, result)
    return Look(seen, registry.judge_all(seen, skip), recipe, plan, refused)
