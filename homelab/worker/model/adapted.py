"""What the adapters of a model are put on, in the words of the table (`homelab.shared.law.usable`), and the refusal of what could not be merged afterwards."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from homelab.shared.law import usable
from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection

# Linear layers whose class has a forward of its own that computes the same.
_PLAIN_LINEARS = ("FalconLinear", "Linear4bit", "Linear8bitLt", "Int8Linear", "Quantised")
_FLAG = "tie_word_embeddings"


def parts(model: Any) -> Iterator[tuple[str, Any, str]]:
    """(name in the base, the layer of PEFT, its kind in the table) of every layer with an adapter of a PEFT model, or of one from PEFT's tuner."""
    from peft.tuners.lora import LoraLayer

    base = base_of(model)
    embeddings, head = weight_of(base.get_input_embeddings()), weight_of(base.get_output_embeddings())
    is_tied = embeddings is not None and embeddings is head
    if head is None and getattr(base, inspection.ENDS_ELSEWHERE, None):
        # The head of a stage that has none is, in the model's words, another stage's copy of the table.
        is_tied = bool(getattr(base.config, _FLAG, False))
    shared = {name for names in _ties(base) for name in names}
    for name, part in base.named_modules():
        if isinstance(part, LoraLayer):
            kind = _kind(part, embeddings, head, is_tied=is_tied)
            if usable.PARTS[kind].merge != usable.UNTIED and any(
                inner in shared for inner in (f"{name}.base_layer.weight", f"{name}.weight")
            ):
                kind = usable.SHARED
            yield name.replace(".base_layer", ""), part, kind


def base_of(model: Any) -> Any:
    """The model of transformers below PEFT, its adapters in it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def weight_of(part: Any) -> Any:
    """The weight of an embedding or a head, with or without an adapter; None where there is none."""
    inner = part.get_base_layer() if hasattr(part, "get_base_layer") else part
    return getattr(inner, "weight", None)


def _ties(model: Any) -> set[tuple[str, ...]]:
    """The names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {tuple(same) for same in names.values() if len(same) > 1}


def _kind(part: Any, embeddings: Any, head: Any, *, is_tied: bool) -> str:
    from peft.tuners.lora import layer as lora
    from transformers.pytorch_utils import Conv1D

    inner = part.get_base_layer()
    if isinstance(part, lora.ParamWrapper):
        return usable.EXPERTS if part.get_param().dim() == 3 else usable.MATRIX
    if isinstance(part, lora.Embedding):
        if type(inner).forward is not torch.nn.Embedding.forward and part._get_embed_scale() is None:
            return usable.OWN_EMBEDDING
        return usable.TIED_EMBEDDING if is_tied and inner.weight is embeddings else usable.EMBEDDING
    if isinstance(part, lora.MultiheadAttention):
        return usable.ATTENTION
    if isinstance(inner, torch.nn.modules.conv._ConvNd):
        return usable.CONVOLUTION
    if isinstance(inner, Conv1D):
        return usable.TRANSPOSED
    if not isinstance(inner, torch.nn.Linear):
        return usable.UNKNOWN
    if type(inner).forward is not torch.nn.Linear.forward and type(inner).__name__ not in _PLAIN_LINEARS:
        return usable.OWN_LINEAR
    if inner.weight is head:
        return usable.TIED_HEAD if is_tied else usable.HEAD
    return usable.LINEAR


def refuse_unmergeable(model: Any) -> None:
    """Raises WorkerError for a model with adapters on what no merge can put them into afterwards, or with layers that are trained whole."""
    whole = sorted({name for settings in model.peft_config.values() for name in getattr(settings, "modules_to_save", None) or ()})
    if whole:  # Unsloth makes that of a head or embeddings in [method] targets
        raise WorkerError(
            f"{', '.join(whole)} would be trained completely beside the adapters, which cannot be merged into the base", where="[method] targets in the recipe",
            hint=f'[method] backend = "transformers" trains adapters on them; or leave {", ".join(whole)} out of targets', needs_launch=True,
        )  # fmt: skip
    found = list(parts(model))
    if any(usable.PARTS[kind].merge == usable.UNTIED for _, _, kind in found) and not can_untie(base_of(model)):
        found = [(name, part, usable.FIXED_HEAD if usable.PARTS[kind].merge == usable.UNTIED else kind) for name, part, kind in found]
    bad = {name.rsplit(".", 1)[-1] for name, _, kind in found if usable.PARTS[kind].merge is None}
    well = sorted({name.rsplit(".", 1)[-1] for name, _, _ in found} - bad)
    for name, part, kind in found:
        refusal = usable.part_refusal(kind, name, type(part.get_base_layer()).__name__, well)
        if refusal is not None:
            raise WorkerError(refusal.reason, where="[method] targets in the recipe", hint=refusal.edit, needs_launch=True)


def unties(model: Any) -> bool:
    """Whether a merge separates the head of this model from its embeddings."""
    return any(usable.PARTS[kind].merge == usable.UNTIED for _, _, kind in parts(model))


def notes(model: Any) -> list[str]:
    """What a person should know before the night of what a merge will make of these adapters."""
    if not unties(model):
        return []
    refusal = usable.gguf_refusal(type(base_of(model)).__name__, is_untied=True)
    return [
        "merge: head and embeddings become two tensors (tie_word_embeddings = false)"
        + (f"; no GGUF file: {refusal.reason}" if refusal else "")
    ]


def can_untie(model: Any) -> bool:
    """Whether this class has a head of its own where config.json says so, and shares all else as before. Builds it twice without weights."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    kind: Any = type(model)
    if kind.__mro__[1].__name__ == kind.__name__:  # a stage's own class (`stage_model`)
        kind = kind.__mro__[1]
    try:
        with torch.device("meta"):
            tied = kind._from_config(copy.deepcopy(config))
            mark_untied(config)
            untied = kind._from_config(config)
    except Exception:  # noqa: BLE001 - a class may refuse it in any way
        return False
    pairs = {tuple(names) for names in _ties(tied) if weight_of(tied.get_input_embeddings()) is tied.get_parameter(names[0])}
    return weight_of(untied.get_output_embeddings()) is not weight_of(untied.get_input_embeddings()) and _ties(tied) - pairs == _ties(
        untied
    )


def mark_untied(config: Any) -> None:
    """Let a configuration say that head and embeddings are two tensors, at each place where it says so."""
    for place in {id(each): each for each in (config, config.get_text_config())}.values():
        if hasattr(place, _FLAG):
            setattr(place, _FLAG, False)


@torch.no_grad()
def untie(model: Any) -> None:
    """Give a plain model a head of its own, with the weights of its embeddings."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    mark_untied(model.config)
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)
