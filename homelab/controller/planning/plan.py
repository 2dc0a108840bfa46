"""The plan: cluster x recipe x facts -> who does what, and why. Pure; it reads from top to bottom as a list of decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.planning import data_source, precision, trainer_choice
from homelab.controller.planning.advice import advice, afterwards, excess, reproducibility
from homelab.controller.planning.environment import launch_spec, network_profile, personal
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.machines import card_guess, cards, lan_address, machines, old_cards
from homelab.controller.planning.memory import wsl
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.speed import roofline
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.base import Strategy
from homelab.controller.planning.strategy.pipeline.pipeline_plan import NoLayerFits
from homelab.controller.planning.time import start_up, step_time
from homelab.controller.planning.types import Choice, Plan, RankPlan
from homelab.controller.planning.work import job
from homelab.shared.law.learning_rate import scaled


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
    precise = precision.choose(recipe, taking_part)
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
    if time is not None and isinstance(work, job.TrainingJob):
        time = start_up.with_start(roofline.interval(time), work, inputs, ranks).model_copy(
            update={"verdict": advice.advice(work, strategy.name, ranks, time)}
        )
    head = taking_part.nodes[0].name
    backend, balance = _backend(taking_part.device), _balance(recipe, strategy, taking_part.device, ranks)
    return Plan(
        run=inputs.run, attempt=inputs.attempt, world_size=len(ranks), backend=backend.value, device=taking_part.device, precision=work.precision,
        strategy=strategy.name, head=head, master_address=addresses[head].address, master_port=inputs.port, resume_step=inputs.resume_step,
        checkpoint_layout=strategy.checkpoint_layout, ranks=ranks, nodes=launch_spec.node_plans(inputs, taking_part, addresses, wire.environment),
        launch=launch_spec.of(inputs, taking_part, strategy.worker_settings(work)),
        choices=(
            *taking_part.choices, *cards.choices(taking_part), *card_guess.choices(taking_part), *personal.choices(taking_part.nodes, recipe), backend, precise, selection.choice,
            *trainer_choice.choices(recipe, taking_part), *_learning_rate(recipe), *data_source.choices(recipe, taking_part.facts, inputs.data),
            *address_choices, *wire.choices, Choice(subject="head", value=head, because="the first well node of cluster.toml"),
            *selection.assignment.choices, *([balance] if balance else ()), *step_time.choices(work, time), *start_up.choices(time),
        ),
        warnings=(
            *work.warnings, *selection.assignment.warnings, *reproducibility.warnings_of(work), *reproducibility.date_warnings(work, inputs.moment),
            *afterwards.warnings(recipe, taking_part.facts), *excess.warnings(recipe, taking_part.facts, inputs.config),
            *wsl.warnings_of(ranks, taking_part.facts, taking_part.device),
            *card_guess.warnings_of(taking_part, time), *precision.warnings_of(recipe, taking_part),
            *reproducibility.precision_warnings(work, precision.without_bf16(taking_part), strategy.name),
        ),
        left_out=taking_part.left_out, time=time, strategies=selection.prices,
        balance=balance.value if balance else "fixed",
    )  # fmt: skip


def _on_fewer_nodes(inputs: PlanInputs, work: job.Job) -> Plan | None:
    """The plan of a pipeline without the nodes that have no room for a single layer; None where that is not what is wrong."""
    if inputs.recipe.parallel.strategy not in ("auto", "pipeline"):
        return None
    fault = registry.STRATEGIES["pipeline"].feasible(work)
    if not isinstance(fault, NoLayerFits) or not fault.others:
        return None
    try:
        plan = make(dataclasses.replace(inputs, cluster=inputs.cluster.only(fault.others)))
    except HomelabError:
        return None
    left_out = [
        Choice(subject=f"node {name}", value="left out", because="not even one layer of the model has room there") for name in fault.nodes
    ]
    return plan.model_copy(
        update={
            "left_out": (*plan.left_out, *fault.nodes),
            "choices": (*left_out, *plan.choices),
            "warnings": (*plan.warnings, f"left out: {fault.message}"),
        }
    )


def _backend(device: str) -> Choice:
    if device == "cuda":
        return Choice(subject="backend", value="nccl", because="every rank has a CUDA card")
    return Choice(subject="backend", value="gloo", because="no CUDA cards: gloo runs on CPUs")


def _balance(recipe: Recipe, strategy: Strategy, device: str, ranks: Sequence[RankPlan]) -> Choice | None:
    """Whether shares follow the speeds that are measured; None where the recipe or the strategy leaves nothing to move."""
    if not isinstance(recipe, TrainRecipe) or recipe.parallel.shares != "auto" or ranks[0].stage:
        return None
    if device == "cuda" and strategy.waits_in_passes:
        because = f"a pass of {strategy.name} on a card waits for the other ranks' weights in its middle, so that its seconds are no speed of this card"
        return Choice(subject="balance", value="fixed", because=because)
    return Choice(
        subject="balance", value="measured", because="shares follow the speeds that the run measures; the training stays the same"
    )


def _learning_rate(recipe: Recipe) -> list[Choice]:
    """The scaled learning rate, where the recipe scales it."""
    if not isinstance(recipe, TrainRecipe) or recipe.train.lr_scale == "none":
        return []
    train = recipe.train
    value = scaled(train.learning_rate, train.lr_scale, train.global_batch, train.reference_batch)
    ratio = f"{train.global_batch} / {train.reference_batch}"
    because = (
        f"{train.learning_rate:g} x {ratio if train.lr_scale == 'linear' else f'sqrt({ratio})'}: chosen for a global batch of "
        f'{train.reference_batch}, lr_scale = "{train.lr_scale}"'
    )
    return [Choice(subject="learning rate", value=f"{value:.4g}", because=because)]
