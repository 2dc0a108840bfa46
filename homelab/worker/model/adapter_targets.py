"""What `targets = "all-linear"` means: attention, shared experts and dense MLPs, in every family. Never the head, a routed expert or a router.

`targets = "all-linear+experts"` means the routed experts, too, and never a router.

PEFT alone means every nn.Linear. Where a family keeps its experts in fused tensors it means these too in the families that it knows, with a
router that learns, and not in others: the same recipe would train 13 million weights in one model and 997 million in its neighbour.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch

from homelab.shared.law.stage import EXPERT_COUNTS, has_experts
from homelab.worker.errors import WorkerError
from homelab.worker.model import fused_experts, inspection

ALL_LINEAR, WITH_EXPERTS = "all-linear", "all-linear+experts"
_ROUTED = re.compile(r"^(local_|routed_)?experts$")
_ROUTER = re.compile(r"^(router|gate|\w*router|\w*expert_gate|switch)$")
# State-space models multiply by these weights past the module, so that an adapter on it would not be computed: `out_proj` in fast kernels (peft
# 0.21, tuners_utils.py, _check_lora_target_modules_mamba), `dt_proj` always (transformers, modeling_mamba.py and modeling_jamba.py).
_PAST_THE_MODULE = {
    "mamba": ("out_proj", "dt_proj"), "falcon_mamba": ("out_proj", "dt_proj"), "jamba": ("dt_proj",),
    "mamba2": ("out_proj",), "falcon_h1": ("out_proj",), "nemotron_h": ("out_proj",),
}  # fmt: skip


def resolved(model: Any, targets: str | tuple[str, ...] | list[str]) -> tuple[str | list[str], list[str] | None]:
    """The targets as PEFT is told them, modules and parameters: the recipe's own, or those that its word stands for where PEFT means others. Raises
    WorkerError where nothing is left."""
    if not isinstance(targets, str):
        return list(targets), None
    chosen = all_linear(model)
    if targets == WITH_EXPERTS:
        return chosen, expert_matrices(model)
    is_plain = len(chosen) == len(linear_modules(model)) and not _blocks(model) and not _is_mixture(model)
    return ALL_LINEAR if is_plain else chosen, None


def expert_matrices(model: Any) -> list[str]:
    """The names of the matrices of all routed experts. Raises WorkerError for a model without experts, and where homelab cannot train adapters on them."""
    outside = tuple(f"{name}." for name in inspection.outside_language(model))
    fused = {
        name: part
        for name, part in model.named_modules()
        if (fused_experts.is_fused(part) or fused_experts.can_be_held(part)) and not f"{name}.".startswith(outside)
    }
    other = sorted({type(part).__name__ for part in fused.values() if not fused_experts.can_be_held(part)})
    if other or not fused:
        why = (
            f"its experts ({', '.join(other)}) are in a form that homelab does not train"
            if other
            else "it has no routed experts in tensors of their own"
        )
        raise WorkerError(
            f'targets = "{WITH_EXPERTS}" is not for {type(model).__name__}: {why}',
            where="[method] targets in the recipe", hint=f'edit the recipe: targets = "{ALL_LINEAR}"', needs_launch=True,
        )  # fmt: skip
    return [f"{name}.{matrix}" for name in fused for matrix in fused_experts.MATRICES]


def all_linear(model: Any) -> list[str]:
    """The names of the modules that "all-linear" stands for. Raises WorkerError where there is none."""
    every, blocks = linear_modules(model), _blocks(model)
    is_mixture = bool(blocks) or _is_mixture(model)
    avoided = _PAST_THE_MODULE.get(model.config.model_type, ())
    chosen = []
    for name in every:
        *parents, last = name.split(".")
        is_router = is_mixture and (
            any(_ROUTER.match(part) for part in (*parents, last)) or (name.rpartition(".")[0] in blocks and _scores(model, name))
        )
        if not is_router and last not in avoided and not any(_ROUTED.match(part) for part in parents):
            chosen.append(name)
    if not chosen:
        raise WorkerError(
            f'targets = "all-linear" finds no layer in {type(model).__name__}: it has {_ends(every) or "no linear layers"}',
            where="[method] targets in the recipe", hint="edit the recipe: targets = a list of some of these names; or another [model] name", needs_launch=True,
        )  # fmt: skip
    return chosen


def _scores(model: Any, name: str) -> bool:
    """Whether this layer beside routed experts has an output for each of them, or one for all."""
    outputs = int(model.get_submodule(name).weight.shape[0])
    settings = model.config.get_text_config().to_dict()
    return outputs == 1 or outputs in {settings.get(key) for key in EXPERT_COUNTS}


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Let PEFT take target names as they stand, while it makes adapters or loads those that homelab saved.

    In families whose experts transformers has fused, it reads `gate_proj`, `up_proj` and `down_proj` as the routed experts, also at the end of
    the name of a shared expert or of a dense layer, which then gets no adapter (peft 0.21, utils/transformers_weight_conversion.py).
    """
    from peft.utils import transformers_weight_conversion as conversion

    original = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = original


def reach(config: Any, names: Collection[str]) -> None:
    """Let the settings of saved adapters reach every weight of their file (`names`). In versions before 0.3 those of a pipeline named the layers of one
    stage alone, where it had few."""
    modules = (name.partition(".lora_")[0] for name in names if ".lora_" in name)
    places = dict.fromkeys(module.removeprefix("base_model.model.").replace(".base_layer", "") for module in modules)
    if any(inspection.pattern(name) != name for name in config.target_parameters or ()):
        own = {name.rpartition(".")[::2] for name in config.target_parameters}
        matrices, kinds = sorted({matrix for _, matrix in own}, reverse=True), {inspection.pattern(place) for place, _ in own}
        of_experts = [place for place in places if inspection.pattern(place) in kinds]
        config.target_parameters = [f"{place}.{matrix}" for place in of_experts for matrix in matrices]
        places = {place: None for place in places if place not in of_experts}
    targets = config.target_modules
    # Names without the number of a layer are those of all; PEFT reads some of them as routed experts.
    if not isinstance(targets, str) and any(inspection.pattern(target) != target for target in targets) and not set(places) <= set(targets):
        config.target_modules = {place for place in places if not _ROUTED.match(place.rpartition(".")[2])}


def is_moved_by_peft(adapted: Any) -> bool:
    """Whether PEFT alone, without `as_written`, reads the saved adapters of this model as those of other layers."""
    from peft.utils import transformers_weight_conversion as conversion

    def reached(config: Any) -> tuple[object, ...]:
        return tuple(
            named if isinstance(named, str) else sorted(named or ()) for named in (config.target_modules, config.target_parameters)
        )

    for config in adapted.peft_config.values():
        read = copy.deepcopy(config)
        conversion.convert_peft_config_for_transformers(read, adapted.get_base_model(), None)
        if reached(read) != reached(config):
            return True
    return False


def is_of_routed_expert(name: str) -> bool:
    """Whether the parameter or module with this name belongs to a routed expert, and is no adapter."""
    return any(_ROUTED.match(part) for part in name.split(".")) and ".lora_" not in name


def _blocks(model: Any) -> set[str]:
    """The names of the modules that hold routed experts."""
    return {name.rpartition(".")[0] for name, _ in model.named_modules() if _ROUTED.match(name.rpartition(".")[2])}


def _is_mixture(model: Any) -> bool:
    return has_experts(model.config.get_text_config().to_dict())


def linear_modules(model: Any) -> list[str]:
    """The names of all linear layers but the head, as PEFT counts them."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear | Conv1D) and part is not head]


def unfit(error: ValueError, model_linear: list[str], dropout: float) -> WorkerError:
    """The error for adapters that PEFT cannot put on a model with linear layers of these names."""
    seen = f"the adapters do not fit this model: {str(error).splitlines()[0]}"
    if "lora_dropout" in str(error):
        return WorkerError(
            seen, where="[method] dropout in the recipe",
            hint=f"edit the recipe: [method] dropout = 0 (now {dropout:g}): adapters on fused tensors have none; or leave the experts out of targets", needs_launch=True,
        )  # fmt: skip
    return WorkerError(
        seen,
        where="[method] targets in the recipe",
        hint=f'this model has {_ends(model_linear)}; or set targets = "all-linear"',
        needs_launch=True,
    )


def _ends(names: list[str]) -> str:
    return ", ".join(sorted({name.rsplit(".", 1)[-1] for name in names}))
