"""What a built model has that may decide a training beside the recipe: chance, weights without a gradient, tied weights, and what the adapters reach.

The model may be real or on the meta device, with adapters or without. Nothing is downloaded and no weight is read, except by `draws` and
`unreached`, which run a few tokens through the model.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from homelab.shared.law import model_chance
from homelab.worker.model import host_layers

ENDS_ELSEWHERE = "homelab_ends_elsewhere"  # of a stage: the names of embeddings and head that other stages have
_ADAPTER = re.compile(r"\.(lora_[A-Za-z_]+|modules_to_save)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Chance:
    """One source of chance: where it is (`*` for the number of a layer), how large, how often, and whether it belongs to the adapters."""

    place: str
    amount: float
    count: int = 1
    is_adapter: bool = False

    def __str__(self) -> str:
        return f"{self.place} = {self.amount:g}"


@dataclass(frozen=True)
class Inspection:
    """`chance` as the model is now; `no_gradient`: trainable parameters that a text cannot reach; `tied`: names of one and the same weight;
    `adapted`: the modules that have adapters, `*` for the number of a layer -> how many; `trained`: the number of trained weights."""

    chance: tuple[Chance, ...]
    no_gradient: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    adapted: Mapping[str, int]
    trained: int


def inspect(model: Any) -> Inspection:
    """All of it. Where the few tokens cannot be computed, as on the meta device in models that look at numbers, `no_gradient` goes by names alone."""
    return Inspection(
        chance=chance(model),
        no_gradient=without_gradient(model),
        tied=tied(model),
        adapted=adapted(model),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
    )


def chance(model: Any) -> tuple[Chance, ...]:
    """Every source of chance that a training pass may draw from: dropout modules, rates that modules keep as numbers, rates in the configuration."""
    found: dict[tuple[str, float, bool], int] = {}
    for place, amount, _ in sources(model):
        key = (pattern(place), amount, is_adapter(place))
        found[key] = found.get(key, 0) + 1
    return tuple(Chance(place, amount, count, is_adapter) for (place, amount, is_adapter), count in sorted(found.items()))


def sources(model: Any) -> Iterator[tuple[str, float, Callable[[float], None]]]:
    """(name, its rate now, how to set it) of every source of chance with a rate above 0 that a text meets. A configuration's numbers count, too,
    because some models read them while they compute, and others only once."""
    towers = tuple(f"{_prefix(model)}{name}." for name in outside_language(model))
    for name, part in model.named_modules():
        if f"{name}.".startswith(towers):
            continue
        for key, value in vars(part).items():
            name_of_rate = "dropout" if key == "p" and isinstance(part, torch.nn.modules.dropout._DropoutNd) else key
            if model_chance.is_rate(name_of_rate, value):
                yield f"{name}.{key}" if name else key, float(value), functools.partial(setattr, part, key)
    for holder in {id(config): config for config in (model.config, model.config.get_text_config())}.values():
        for name, value in vars(holder).items():
            if model_chance.is_rate(name, value) and model_chance.is_read(name):
                yield f"config.json.{name}", float(value), functools.partial(setattr, holder, name)


def _prefix(model: Any) -> str:
    """What the names of the base model's modules begin with: nothing without adapters."""
    base = base_of(model)
    return next((f"{name}." for name, part in model.named_modules() if part is base and name), "")


def base_of(model: Any) -> Any:
    """The causal LM, without the adapters' wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_adapter(name: str) -> bool:
    """Whether a module or parameter of this name belongs to the adapters."""
    return _ADAPTER.search(f".{name}.") is not None


def pattern(name: str) -> str:
    """A module's name with `*` in the place of each number."""
    return _NUMBER.sub("*", name)


def language(model: Any) -> tuple[Any, ...]:
    """The parts of a causal LM that a text goes through: its decoder and its head. The others see images or hear sounds."""
    base = base_of(model)
    return tuple(part for part in (base.get_decoder(), base.get_output_embeddings(), base.get_input_embeddings()) if part is not None)


def layers(model: Any) -> Any:
    """The layers of a causal LM's decoder in their order; None for a class that has no list of them."""
    lists = [part for part in base_of(model).get_decoder().children() if isinstance(part, torch.nn.ModuleList)]
    return max(lists, key=len, default=None)


def outside_language(model: Any) -> tuple[str, ...]:
    """The names of all modules below which no part of the language model lies: towers for images and sounds and what joins them to it."""
    base = base_of(model)
    inner = {id(part) for whole in language(model) for part in whole.modules()}
    parents = {id(part) for part in base.modules() if any(id(below) in inner for below in part.modules())}
    names = [name for name, part in base.named_modules() if id(part) not in parents and id(part) not in inner]
    return tuple(name for name in names if not any(name.startswith(f"{other}.") for other in names))


def let_cache(model: Any, value: bool) -> None:
    """Whether its passes keep keys and values. A model that sees says so twice, and its language part alone, a stage of a pipeline, reads its own word."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = value


def towers(model: Any) -> tuple[str, ...]:
    """What the names of their weights begin with."""
    return tuple(f"{_prefix(model)}{name}." for name in outside_language(model))


def without_gradient(model: Any) -> tuple[str, ...]:
    """The trainable parameters that get no gradient in a training on text. Of experts, a few tokens reach some only: they are never counted."""
    inside = {id(parameter) for whole in language(model) for parameter in whole.parameters()}
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    named = {name for name, parameter in trained.items() if name.startswith(towers(model)) and id(parameter) not in inside}
    graph = unreached(model)
    return tuple(name for name in trained if name in named or (graph is not None and name in graph and "expert" not in name))


def unreached(model: Any) -> frozenset[str] | None:
    """The trainable parameters that are not in the graph of a few tokens' loss; None where this model cannot compute on its device."""
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    was_training = model.training
    model.eval()
    try:
        with torch.enable_grad(), host_layers.graph(model):
            root = model(input_ids=tokens, use_cache=False).logits.grad_fn
    except Exception:  # noqa: BLE001 - the model's own code
        # The model's own code: it looks at numbers that are not there on the meta device, or at a shape that PEFT has changed.
        return None
    finally:
        model.train(was_training)
    reached = _leaves(root)
    return frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in reached)


def _leaves(root: Any) -> set[int]:
    """The ids of the parameters at the ends of an autograd graph; none for a root of None."""
    seen: set[Any] = set()
    leaves: set[int] = set()
    waiting = [root] if root is not None else []
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            leaves.add(id(function.variable))
        waiting += [below for below, _ in function.next_functions if below is not None]
    return leaves


def tied(model: Any) -> tuple[tuple[str, ...], ...]:
    """Names of weights that are one and the same."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


def adapted(model: Any) -> dict[str, int]:
    """The modules with adapters, `*` for the number of a layer -> how many there are."""
    found: dict[str, int] = {}
    places = {
        _ADAPTER.split(name, maxsplit=1)[0].removesuffix(".base_layer")
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _ADAPTER.search(name)
    }
    for place in sorted(places):
        key = pattern(place).removeprefix("base_model.model.")
        found[key] = found.get(key, 0) + 1
    return found


def draws(model: Any) -> bool | None:
    """Whether a training pass draws random numbers, found with a few tokens; every generator is put back. For real models; None where this one cannot
    compute."""
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    was_training, before = model.training, _generators(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        model.train()
        try:
            model(input_ids=tokens, use_cache=False)
        except Exception:  # noqa: BLE001 - the model's own code, as above
            return None
        finally:
            model.train(was_training)
            after = _generators(device)
            random.setstate(before[0])
            numpy.random.set_state(before[1])
    return any(repr(one) != repr(other) for one, other in zip(before[:2], after[:2], strict=True)) or not all(
        map(torch.equal, before[2:], after[2:])
    )


def _generators(device: torch.device) -> list[Any]:
    """The states of Python's generator, of numpy's and of torch's."""
    states = [random.getstate(), numpy.random.get_state(), torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
