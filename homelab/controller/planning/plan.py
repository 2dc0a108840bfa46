"""The plan: cluster x recipe x facts -> who does what, and why. Pure; it reads from top to bottom as a list of decisions."""

from __future__ import annotations

import dataclasses

from homelab.controller.base.errors import HomelabError
from homelab.controller.planning import choices
from homelab.controller.planning.advice import advice, excess, reproducibility
from homelab.controller.planning.environment import launch_spec, network_profile, personal
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import card_guess, cards, lan_address, machines, old_cards, standbys
from homelab.controller.planning.memory import wsl
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.speed import roofline
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.time import start_up, step_time
from homelab.controller.planning.types import Choice, Plan
from homelab.controller.planning.work import job


def make(inputs: PlanInputs) -> Plan:
    """The plan of one attempt on all nodes of the cluster. Raises InputError for a recipe that cannot be trained on them."""
    inputs = dataclasses.replace(inputs, facts=cards.of_cluster(inputs.cluster, inputs.facts))
    taking_part = machines.choose(inputs)
    try:
        plan = _on_all(inputs, taking_part)
    except HomelabError as error:
        instead = old_cards.without(inputs, taking_part, error, make)
        if instead is None:
            raise
        return instead
    return old_cards.without(inputs, taking_part, plan, make) or plan


def _on_all(inputs: PlanInputs, taking_part: machines.Machines) -> Plan:
    """The plan on these machines. Raises as `make`."""
    recipe = inputs.recipe
    wsl.refuse_paging(recipe, taking_part.names, taking_part.facts, taking_part.device)
    precise = choices.precision(recipe, taking_part)
    work = job.of(inputs, taking_part, precise.value)
    addresses, address_choices = lan_address.choose(inputs.cluster, taking_part)
    wire = network_profile.choose(inputs.cluster, recipe, taking_part, addresses, inputs.throughputs)
    try:
        selection = registry.choose_strategy(work)
    except DoesNotFit:
        plan = _on_fewer_nodes(inputs, work)
        if plan is None:
            raise
        return plan
    strategy, ranks, time = selection.strategy, selection.assignment.ranks, selection.time
    fewer = choices.with_bf16(recipe, taking_part)
    if time is not None and isinstance(work, job.TrainingJob):
        faster, verdict = advice.advice(work, strategy, ranks, time)
        time = start_up.with_start(roofline.interval(time), work, inputs, strategy.loaded_part(ranks)).model_copy(
            update={"verdict": verdict}
        )
        fewer = fewer or faster
    head = taking_part.nodes[0].name
    backend, balance = choices.backend(taking_part.device), choices.balance(work, strategy)
    return Plan(
        run=inputs.run, attempt=inputs.attempt, world_size=len(ranks), backend=backend.value, device=taking_part.device, precision=work.precision,
        strategy=strategy.name, head=head, master_address=addresses[head].address, master_port=inputs.port, resume_step=inputs.resume_step,
        checkpoint_layout=strategy.checkpoint_layout, ranks=ranks, nodes=launch_spec.node_plans(inputs, taking_part, addresses, wire.environment),
        launch=launch_spec.of(inputs, taking_part, strategy.worker_settings(work)),
        choices=(
            *taking_part.choices, *cards.choices(taking_part), *card_guess.choices(taking_part), *personal.choices(taking_part.nodes, recipe), backend, precise, selection.choice,
            *choices.trainer(recipe, taking_part), *choices.learning_rate(recipe), *choices.data_source(recipe, taking_part.facts, inputs.data),
            *address_choices, *wire.choices, Choice(subject="head", value=head, because="the first healthy node of cluster.toml"),
            *selection.assignment.choices, *([balance] if balance else ()), *step_time.choices(work, time), *start_up.choices(time),
            *standbys.choices(recipe, taking_part, ranks),
        ),
        warnings=(
            *work.warnings, *selection.assignment.warnings, *reproducibility.warnings_of(work), *reproducibility.date_warnings(work, inputs.moment),
            *excess.result_warnings(recipe, taking_part.facts), *excess.warnings(recipe, taking_part.facts, inputs.config),
            *wsl.warnings_of(ranks, taking_part.facts, taking_part.device),
            *card_guess.warnings_of(taking_part, time), *choices.precision_warnings(recipe, taking_part),
            *reproducibility.precision_warnings(work, choices.without_bf16(taking_part), strategy),
        ),
        left_out=taking_part.left_out, fewer=fewer, time=time, strategies=selection.prices,
        balance=balance.value if balance else "fixed",
    )  # fmt: skip


def _on_fewer_nodes(inputs: PlanInputs, work: job.Job) -> Plan | None:
    """The plan without the nodes that have no room for the least part of the model; None where that is not what is wrong."""
    fault = registry.useless_nodes(work)
    if fault is None or not fault.others:
        return None
    try:
        plan = make(dataclasses.replace(inputs, cluster=inputs.cluster.only(fault.others)))
    except HomelabError:
        return None
    left_out = [
        Choice(subject=f"node {name}", value="left out", because=f"not even {fault.part} of the model fits on {name}")
        for name in fault.nodes
    ]
    return plan.model_copy(
        update={
            "left_out": (*plan.left_out, *fault.nodes),
            "choices": (*left_out, *plan.choices),
            "warnings": (*plan.warnings, f"left out: {fault.message}"),
        }
    )
