"""What the cluster decides where the recipe leaves it open, and why: precision, trainer, data, backend, balance, learning rate. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from homelab.controller.base.units import listed
from homelab.controller.config.recipe import Recipe, ScriptRecipe, TrainRecipe
from homelab.controller.facts import card_generation
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import cards
from homelab.controller.planning.machines.machines import Machines, RankSlot
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.controller.planning.strategy.base import Strategy
from homelab.controller.planning.types import Choice, FewerNodes
from homelab.controller.planning.work.job import Job
from homelab.shared.law.learning_rate import scaled


def precision(recipe: Recipe, machines: Machines) -> Choice:
    """bf16, fp16 or fp32, with the reason."""
    asked = recipe.train.precision if isinstance(recipe, TrainRecipe) else "auto"
    if asked != "auto":
        return Choice(subject="precision", value=asked, because="the recipe says so")
    if machines.device == "cpu":
        return Choice(subject="precision", value="fp32", because="CPUs: exact, and 16 bits gain little there")
    without, unknown = without_bf16(machines), _named(_slots(machines, has_bf16=None))
    if without:
        reasons = [f"no bf16 on {', '.join(without)}"] if len(unknown) < len(without) else []
        reasons += [f"it is not known whether {listed(unknown)} has bf16"] if unknown else []
        return Choice(subject="precision", value="fp16", because="; ".join(reasons))
    return Choice(subject="precision", value="bf16", because="every card has bf16")


def without_bf16(machines: Machines) -> list[str]:
    """The nodes with a card that has no bf16, or is not known to have it; none on CPUs."""
    slots = [*_slots(machines, has_bf16=False), *_slots(machines, has_bf16=None)]
    return list(dict.fromkeys(slot.node.name for slot in sorted(slots, key=lambda slot: slot.rank)))


def with_bf16(recipe: Recipe, machines: Machines) -> FewerNodes | None:
    """The nodes whose cards have the bf16 that the recipe asks for; None where all may have it, or none has."""
    old = _slots(machines, has_bf16=False)
    nodes = list(dict.fromkeys(slot.node.name for slot in old))
    others = tuple(name for name in machines.names if name not in nodes)
    if not (isinstance(recipe, TrainRecipe) and recipe.train.precision == "bf16" and nodes and others):
        return None
    because = f'{listed(_named(old))} has none (before Ampere), and the recipe has precision = "bf16"'
    return FewerNodes(nodes=others, edit=f"leave {listed(nodes)} out", because=because)


def precision_warnings(recipe: Recipe, machines: Machines) -> list[str]:
    """The cards of an unknown generation, and those that a recipe asks for what they do not have."""
    if not isinstance(recipe, TrainRecipe) or recipe.train.precision not in ("auto", "bf16"):
        return []
    warnings = []
    old, unknown = _slots(machines, has_bf16=False), _slots(machines, has_bf16=None)
    is_auto = recipe.train.precision == "auto"
    if unknown:
        ask = "preflight" if any(slot.facts for slot in unknown) else "plan RECIPE"
        so = "so precision is fp16, which every card has" if is_auto and not old else "and cards before Ampere (8.0) have none"
        key = 'precision = "bf16" trusts it' if is_auto else 'precision = "auto" chooses by the cards'
        warnings.append(
            f"whether {listed(_named(unknown))} has bf16 is not known here, {so}: the node knows it (homelab {ask}); [train] {key}"
        )
    if old and not is_auto:
        fewer = with_bf16(recipe, machines)
        without = f", or {fewer.edit}: {fewer.option}" if fewer else ""
        warnings.append(
            f'precision = "bf16", and {listed(_named(old))} has none (before Ampere): preflight refuses it. Edit [train] precision = "auto" (fp16 there){without}'
        )
    return warnings


def _slots(machines: Machines, *, has_bf16: bool | None) -> list[RankSlot]:
    slots = machines.slots if machines.device == "cuda" else ()
    return [slot for slot in slots if card_generation.has_bf16(slot.capability) is has_bf16]


def _named(slots: Iterable[RankSlot]) -> list[str]:
    return list(dict.fromkeys(f"{cards.short(slot.name)} of {slot.node.name}" for slot in slots))


def trainer(recipe: Recipe, machines: Machines) -> list[Choice]:
    """One line for the plan; none where everything is trained, or by a [script]: there is nothing to choose.

    "auto" is transformers, on any cluster: the library must not depend on which packages are installed. The reason says where
    Unsloth would be taken: for adapters without dropout on one CUDA card alone, which is what its kernels are made for.
    """
    if isinstance(recipe, ScriptRecipe) or recipe.method.kind == "full":
        return []
    method = recipe.method
    if method.backend != "auto":
        return [Choice(subject="trainer", value=method.backend, because="the recipe says so")]
    return [Choice(subject="trainer", value="transformers", because=f"auto; {_of_unsloth(method.dropout, machines)}")]


def _of_unsloth(dropout: float, machines: Machines) -> str:
    """Why Unsloth is not taken, or how to take it."""
    world_size, facts = machines.world_size, machines.facts
    if machines.device != "cuda":
        return "Unsloth would be used with one CUDA card: its kernels are for cards"
    if world_size > 1:
        return f"Unsloth would be used with one CUDA card only, and here are {world_size}: its kernels were never measured with several"
    if dropout > 0:
        return f"Unsloth would be used with this one card without dropout: {dropout:g} turns its fused kernels off"
    (node,) = machines.nodes
    if node.name not in facts:
        state = f"it was not looked for at {node.unsloth_python}"
    elif facts[node.name].python.unsloth:
        state = f"{facts[node.name].python.unsloth} is there, at {node.unsloth_python}"
    else:
        state = f"there is none at {node.unsloth_python}: homelab setup {node.name} --unsloth"
    return f'Unsloth would be used with this one card: [method] backend = "unsloth" ({state})'


def data_source(recipe: Recipe, facts: Mapping[str, Facts], data: Mapping[str, DataFile]) -> list[Choice]:
    """One for each role that the hub has, and one for the template where plain prompts may meet it."""
    if isinstance(recipe, ScriptRecipe):
        return []
    reasons = []
    for role in ("train", "eval"):
        named = recipe.data.hub(role)
        if named is None:
            continue
        resolved = data[role].hub if role in data else None
        revision = (resolved or named).revision
        origin = "the recipe says so" if named.revision else "the newest at that time"
        because = (
            f"revision {revision}, {origin}: every node and every attempt loads it"
            if revision
            else ("the newest revision at the launch; a rank with another one ends the run before its first step")
        )
        value = ", ".join(filter(None, (f"hub:{named.path}", named.config, f"split {named.split}")))
        reasons.append(Choice(subject=f"{role} data", value=value, because=because))
    return reasons + _template(recipe, facts)


def _template(recipe: TrainRecipe, facts: Mapping[str, Facts]) -> list[Choice]:
    has_one = any(node_facts.model.has_chat_template for node_facts in facts.values() if node_facts.model)
    if recipe.data.template == "none":
        because = '[data] template = "none": plain prompts and completions are joined without changes, as in TRL'
        return [Choice(subject="chat template", value="not used", because=because)]
    if not has_one or recipe.data.format not in ("auto", "prompt-completion"):
        return []
    because = 'the model has one: a plain prompt becomes the question and the completion its answer; [data] template = "none" joins them without changes, as in TRL'
    return [Choice(subject="chat template", value="used", because=because)]


def backend(device: str) -> Choice:
    """What carries the sums between ranks."""
    if device == "cuda":
        return Choice(subject="backend", value="nccl", because="every rank has a CUDA card")
    return Choice(subject="backend", value="gloo", because="no CUDA cards: gloo runs on CPUs")


def balance(job: Job, strategy: Strategy) -> Choice | None:
    """Whether shares follow the speeds that are measured; None where the recipe or the strategy leaves nothing to move."""
    if not isinstance(job.recipe, TrainRecipe) or job.recipe.parallel.shares != "auto" or not strategy.moves_rows(job):
        return None
    if job.machines.device == "cuda" and strategy.waits_in_passes:
        because = f"a pass of {strategy.name} on a card waits for the weights of other ranks, so its time is not the speed of this card"
        return Choice(subject="balance", value="fixed", because=because)
    return Choice(
        subject="balance", value="measured", because="shares follow the speeds that the run measures; the training stays the same"
    )


def learning_rate(recipe: Recipe) -> list[Choice]:
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
