"""One preflight of a cluster: facts, link tests, a data sample, the plan, the collective test and the findings.

`homelab preflight` shows the findings; `homelab launch` refuses to start when one of them is a failure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from homelab.controller.attempt import planner
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.checks.collective import judge as collective_checks
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.checks.machine import runs
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.network import PortFacts
from homelab.controller.features.preflight import collective_check as collective_check
from homelab.controller.features.preflight import data_sample, gather, model_build
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.shared.protocol.network_messages import FreePortRequest

DEFAULT_PORT = 29500


@dataclass(frozen=True)
class PreflightResult:
    """What was seen and what the checks make of it. `recipe` has its open batch settled; `refused` says why there is no plan."""

    evidence: Evidence
    findings: list[Finding]
    recipe: Recipe | None = None
    plan: Plan | None = None
    refused: HomelabError | None = None


def look(
    fleet: Fleet, recipe: Recipe | None, items: list[RecipeInput], *, skip: Collection[str], test_collective: collective_checks.When,
    run_name: Callable[[Evidence], str], say: Say = lambda text: None,
) -> PreflightResult:  # fmt: skip
    """Everything of one preflight. Raises nothing for a node that fails: that is a finding.

    `skip` holds ids of checks (`registry.skipped`): what only they would look at is not done either. `run_name` gives the run's name once the nodes have answered.
    """
    port = recipe.parallel.port if recipe else DEFAULT_PORT
    deep = test_collective == "always"
    evidence = gather.facts(fleet, recipe=recipe, material=items, port=port, say=say, deep=deep, for_person=True)
    evidence = _with_free_port(fleet, evidence)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="sample") as pool:
        # The tokenizer and the build take seconds on one node each while the dials keep all wires busy.
        sampled = built = None
        if recipe is not None and evidence.facts and any(check.id not in skip for check in registry.CHECKS if check.sees == "sample"):
            sampled = pool.submit(data_sample.look, fleet, evidence, recipe, items)
        if recipe is not None and evidence.facts and any(check.id not in skip for check in registry.CHECKS if check.sees == "build"):
            built = pool.submit(model_build.look, fleet, evidence, recipe)
        try:
            evidence = gather.with_links(fleet, evidence, say=say)
            if sampled is not None:
                say("reading a sample of the data")
                evidence = replace(evidence, sample=sampled.result())
            if built is not None:
                say("building the model without its weights")
                evidence = model_build.known_config(replace(evidence, build=built.result()))
        except KeyboardInterrupt:  # the pool waits for its threads, and these wait for minutes
            fleet.give_up_all()
            raise
    plan, refused = None, None
    if recipe is not None and evidence.facts:
        try:
            recipe, plan = planner.settled(planner.inputs_from(evidence, recipe, items, run_name(evidence), port=evidence.master_port))
        except HomelabError as error:
            refused = error
        evidence = replace(evidence, plan=plan, refused=refused)
    if collective_checks.wanted(evidence, skip, test_collective):
        try:
            result = collective_check.run(fleet, evidence, say)
        except InputError as error:  # without a recipe nobody has tried to plan before
            refused = error
        else:
            evidence = replace(evidence, collective=result)
            collective_check.keep(fleet, evidence, result)
    return PreflightResult(evidence, registry.judge_all(evidence, skip), recipe, plan, refused)


def _with_free_port(fleet: Fleet, evidence: Evidence) -> Evidence:
    """Where a run of ours that is well holds the rendezvous port, another one that is free: who computes what is as before."""
    head = evidence.facts.get(evidence.head)
    held = head.network.port if head is not None else None
    if head is None or held is None or held.free or not held.holder_run or runs.why_stale(head, held.holder_run):
        return evidence
    try:
        port = int(fleet.agent(evidence.head).ask("free-port", FreePortRequest(low=evidence.master_port + 1))["port"])
    except HomelabError:
        return evidence
    free = head.model_copy(update={"network": head.network.model_copy(update={"port": PortFacts(free=True)})})
    return replace(evidence, master_port=port, facts={**evidence.facts, evidence.head: free})
