"""Which layers of a model get adapters, and how many parameters these have. Pure.

The counts follow `peft` (tuners/lora); the tests compare them with it, module by module, on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.layers import Linear
from homelab.shared.recipe import Method

ALL_LINEAR: Literal["all-linear"] = "all-linear"
WITH_EXPERTS = "all-linear+experts"
Targets = Literal["all-linear", "all-linear+experts"] | Sequence[str]
# Names that reach the fused experts or the router of a mixture, in one family or another (peft, utils/transformers_weight_conversion.py).
_OF_EXPERTS = frozenset(("w1", "w2", "w3", "gate_proj", "up_proj", "down_proj", "gate_up_proj", "experts", "gate", "router"))


def counted(architecture: Architecture | None, method: Method) -> Architecture | None:
    """The shape, or None where no formula counts such a training: a list of targets that names routed experts or the router of a mixture, and all weights of a
    model that sees."""
    if architecture is None or (method.kind == "full" and architecture.outside):
        return None
    if architecture.experts is None or isinstance(method.targets, str):
        return architecture
    return None if any(target.rsplit(".", 1)[-1] in _OF_EXPERTS for target in method.targets) else architecture


def adapted_linears(architecture: Architecture, targets: Targets) -> tuple[tuple[Linear, int], ...]:
    """The layers that get an adapter, each with how often it occurs in the model.

    "all-linear" is every nn.Linear but the head (peft, `_maybe_include_all_linear_layers`): of a mixture attention, shared experts and dense
    layers. "all-linear+experts" adds both matrices of each routed expert. A target may be written with its parents ("self_attn.q_proj"); "lm_head"
    and "embed_tokens" can be named. Raises InputError for a name the model lacks, and where it has no such experts.
    """
    if targets == ALL_LINEAR:
        return architecture.linears
    if targets == WITH_EXPERTS:
        if architecture.experts is None or not architecture.experts.packs:
            has = "no routed experts" if architecture.experts is None else "experts in a form that takes no adapters"
            raise InputError(f"the model has {has}", where="recipe, [method] targets", hint=f'targets = "{ALL_LINEAR}"')
        return (*architecture.linears, *architecture.routed)
    ends = (("lm_head", architecture.hidden, architecture.vocabulary), ("embed_tokens", architecture.vocabulary, architecture.hidden))
    every = (*architecture.linears, *((Linear(*end), 1) for end in ends))
    known_names = dict.fromkeys(linear.name for linear, _ in every)
    names = dict.fromkeys(target.rsplit(".", 1)[-1] for target in targets)
    unknown = [name for name in names if name not in known_names]
    if unknown or not names:
        quoted = ", ".join(f'"{name}"' for name in unknown)
        near = did_you_mean(unknown[0], known_names) if unknown else ""
        raise InputError(
            f"the model has no layer named {quoted}.{near}" if unknown else "no layer is named for the adapters",
            where="recipe, [method] targets",
            hint=f'targets = "all-linear", or a list of: {", ".join(known_names)}',
        )
    return tuple((linear, count) for name in names for linear, count in every if linear.name == name)


def adapter_matrices(architecture: Architecture, rank: int, targets: Targets) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, how many) of every trained matrix of LoRA. A layer has one of each kind for all its experts. Raises InputError as `adapted_linears`."""
    routed = architecture.routed if targets == WITH_EXPERTS and architecture.experts else ()
    for linear, count in adapted_linears(architecture, targets):
        together = architecture.experts.count if architecture.experts and (linear, count) in routed else 1
        yield together * rank, linear.inputs, count // together
        yield linear.outputs, together * rank, count // together


def computed_parameters(architecture: Architecture, rank: int, targets: Targets) -> int:
    """Parameters of the adapters that one token is multiplied with: of experts, those of its own."""
    every = lora_parameters(architecture, rank, targets)
    if targets != WITH_EXPERTS or architecture.experts is None:
        return every
    of_experts = every - lora_parameters(architecture, rank, ALL_LINEAR)
    return every - of_experts + of_experts * architecture.experts.per_token // architecture.experts.count


def lora_parameters(architecture: Architecture, rank: int, targets: Targets = ALL_LINEAR) -> int:
    """Trainable parameters of LoRA: the sum of rank x (inputs + outputs) over all adapted layers (Hu et al. 2021).

    Raises InputError for a target that the model lacks.
    """
    return sum(count * rank * (linear.inputs + linear.outputs) for linear, count in adapted_linears(architecture, targets))
