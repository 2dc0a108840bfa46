"""A model with the layers of one stage: transformers' own class, in which every other part is a stand-in without weights.

The class builds itself on the meta device, the parts of other stages are replaced, and transformers reads what is left from the files, tensor
by tensor, quantised layer by layer. The names of the weights are those of the whole model. Called with `inputs_embeds`, the model runs its own
layers: `logits` of a stage that is not the last are its hidden states.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from homelab.shared.law.stage import ROUTER_LOSS_OFF, Stage, why_not_in_stages
from homelab.worker.errors import WorkerError
from homelab.worker.model import base_kind, inspection
from homelab.worker.model.layer_major import StandIn

_WHERE = "[model] name in the recipe"
_TIE = "tie_word_embeddings"
_HINT = 'set [parallel] strategy = "zero3": it divides any model of transformers'


class Elsewhere(StandIn):
    """A layer, a norm or a head of another stage."""


class StandInEmbedding(torch.nn.Module):
    """The embeddings of another stage: vectors that only depend on the token, for the small tests of a loaded model."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.dtype = hidden, dtype

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, self.hidden + 1, device=input_ids.device, dtype=torch.float32)
        return torch.cos((input_ids.unsqueeze(-1) + 1) * places * 0.37).to(self.dtype)


def load(path: str, *, stage: Stage, dtype: torch.dtype, scores: bool = False, **options: Any) -> Any:
    """The model of this stage with its own weights; `options` are those of `from_pretrained`. `scores`: no stage has the head for words, another one comes in its
    place. Raises WorkerError for a model that cannot be cut."""
    from transformers import AutoConfig
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from homelab.worker.model.pretrained import from_pretrained

    config = from_pretrained(AutoConfig, path, revision=options.get("revision"))
    whole = _class_of(config)
    if whole.config_class is type(config.get_text_config()):  # a model that sees has a language part with a class of its own
        config = config.get_text_config()
    own_config, ties = copy.deepcopy(config), getattr(config, _TIE, False) and not scores
    _say_tied(own_config, ties and stage.is_last)  # else the head that shares its weights is elsewhere

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        whole.__init__(self, config, *args, **kwargs)
        cut(self, stage, dtype, scores=scores)

    def forward(self: Any, labels: None = None, logits_to_keep: int = 0, **inputs: Any) -> Any:
        """Hidden states as `logits`, with nothing that the class does to its logits (Gemma 2 caps them)."""
        return CausalLMOutputWithPast(logits=decoder_of(self)(**inputs).last_hidden_state)

    not_own = {"_keys_to_ignore_on_load_unexpected": [".*"]}  # the files have the weights of all stages
    own = type(
        whole.__name__,
        (whole,),
        {"__init__": build, "__module__": whole.__module__, **({} if stage.is_last else {"forward": forward}), **not_own},
    )
    report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model = base_kind.whole(from_pretrained(own, path, config=own_config, dtype=dtype, **options, **report), path)
    _say_tied(model.config, ties)  # what the whole model is, as it is saved
    check(model)
    return model


def cut(model: Any, stage: Stage, dtype: torch.dtype, *, scores: bool = False) -> None:
    """Replace every part of a causal LM that other stages hold, and say which ends they are. Raises WorkerError where a part is not where models of transformers
    have it."""
    for name in inspection.outside_language(model):  # what sees or hears: no text goes through it
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Elsewhere(model.get_submodule(name)))
    decoder = decoder_of(model)
    if len(decoder.layers) != stage.layers:
        raise WorkerError(
            f"the plan divides {stage.layers} layers, but the model has {len(decoder.layers)}", where=_WHERE,
            hint="the base model on this node is a different one: copy the same model folder to every node",
        )  # fmt: skip
    for number, layer in enumerate(decoder.layers):
        if not stage.holds(number):
            decoder.layers[number] = Elsewhere(layer)
    # A table that is the head, too, is on the last stage as its head alone: no token goes into it there.
    is_here = {decoder.embed_tokens: stage.is_first, model.lm_head: stage.is_last and not scores}
    setattr(model, inspection.ENDS_ELSEWHERE, [name for name, part in model.named_modules() if not is_here.get(part, True)])
    if not stage.is_first and not (stage.is_last and is_tied(model)):
        decoder.embed_tokens = StandInEmbedding(model.config.get_text_config().hidden_size, dtype)
    if not stage.is_last:
        decoder.norm = Elsewhere(decoder.norm)
    if not is_here[model.lm_head]:
        model.lm_head = Elsewhere(model.lm_head)


def is_tied(model: Any) -> bool:
    """Whether the table of embeddings is the head, too: of the whole model, whatever this stage has of it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return bool(getattr(base.config, _TIE, False)) and bool(base._tied_weights_keys)


def table_of(model: Any) -> tuple[str, torch.nn.Parameter]:
    """The table of embeddings, with its name in the model."""
    table = decoder_of(model).embed_tokens.weight
    return next((name, weight) for name, weight in model.named_parameters() if weight is table)


def head_of(model: Any) -> torch.nn.Parameter:
    """The weight of the head. It is the table of a tied model, unless the files have two tensors that differ: transformers believes the files then."""
    weight: torch.nn.Parameter = inspection.base_of(model).lm_head.weight
    return weight


def _say_tied(config: Any, value: bool) -> None:
    """In every part of a configuration that says whether embeddings are the head: transformers reads one of them."""
    for part in (config, config.get_text_config()):
        if hasattr(part, _TIE):
            setattr(part, _TIE, value)


def decoder_of(model: Any) -> Any:
    """The part of a causal LM (with adapters or not) that has the layers. Raises WorkerError for a model whose layers are not where they are looked for."""
    base = inspection.base_of(model)
    decoder = base.get_decoder()
    parts = ("layers", "embed_tokens", "norm")
    missing = [name for name in parts if not isinstance(getattr(decoder, name, None), torch.nn.Module)]
    if missing or not isinstance(getattr(base, "lm_head", None), torch.nn.Module):
        raise WorkerError(
            f"{type(base).__name__} cannot be cut into stages: it has no {', '.join(missing or ['lm_head'])} at the place of a Llama model",
            where=_WHERE, hint=_HINT, needs_launch=True,
        )  # fmt: skip
    return decoder


@torch.no_grad()
def check(model: Any) -> None:
    """Without its layers and its norm, the decoder must give back what it gets, to the last bit. Raises WorkerError for a model that does more
    between its layers (scales its embeddings, adds one layer's output to another's; in training, has dropout there)."""
    decoder = decoder_of(model)
    layers, norm = dict(decoder.layers.named_children()), decoder.norm
    weight = next(model.parameters())
    given = torch.randn(1, 3, model.config.get_text_config().hidden_size, generator=torch.Generator().manual_seed(1)).to(weight.device)
    try:
        for name, layer in layers.items():
            decoder.layers._modules[name] = Elsewhere(layer)
        decoder.norm = Elsewhere(norm)
        answer = decoder(inputs_embeds=given).last_hidden_state
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 - the model's own code: Gemma 4 with vectors for each layer wants to know the tokens
        answer = None
    finally:
        decoder.layers._modules.update(layers)
        decoder.norm = norm
    shares = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0)  # one layer's keys and values are another's, too
    if shares or answer is None or not torch.equal(answer, given):
        raise WorkerError(
            f"{type(model).__name__} cannot be cut into stages: it computes more than its layers in order",
            where=_WHERE, hint=_HINT, needs_launch=True,
        )  # fmt: skip


def _class_of(config: Any) -> Any:
    """The causal LM of this configuration. Raises WorkerError for one that transformers does not know, and for experts whose router has a loss."""
    from transformers import AutoModelForCausalLM

    reason = why_not_in_stages(config.get_text_config().to_dict())
    if reason is not None:
        raise WorkerError(
            f"a pipeline does not train this mixture of experts ({config.model_type}): {reason}",
            where=_WHERE, hint=f"{ROUTER_LOSS_OFF}; or {_HINT}", needs_launch=True,
        )  # fmt: skip
    known = AutoModelForCausalLM._model_mapping
    if type(config) not in known:
        raise WorkerError(
            f"{config.model_type} is not a causal language model that transformers knows",
            where=_WHERE,
            hint="choose another [model] name",
            needs_launch=True,
        )
    classes = known[type(config)]
    return classes[0] if isinstance(classes, list | tuple) else classes
