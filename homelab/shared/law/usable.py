"""What can be trained and what becomes of it: one table that planner, preflight, worker, merge and GGUF read. Pure.

    how the model's files hold its weights  x  [method]      -> may it be trained            (CHECKPOINTS)
    what an adapter is put on                                -> trained, merged, in a GGUF file (PARTS)
    the class of the model in transformers                   -> does llama.cpp's converter know it (`gguf_refusal`)

What is refused is refused before it is trained: after the night it is too late.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.shared.law import gguf_classes
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.quantisation import Stored

# How a model's files hold its weights. Any other word is the `quant_method` of its config.json.
PLAIN = "16 or 32 bits"
BNB_4BIT = "bitsandbytes in 4 bits"
BNB_8BIT = "bitsandbytes in 8 bits"
WIDENED = "converted to 16 bits"
FOREIGN = "another quantisation"
FULL, LORA, LORA_8BIT, QLORA = "full", "lora", "lora 8bit", "qlora"
METHODS = (FULL, LORA, LORA_8BIT, QLORA)
# What a merge can be made onto.
ORIGINAL, DEQUANTISED = "original", "dequantised"


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be trained or made, and the edit after which it can."""

    reason: str
    edit: str


@dataclass(frozen=True)
class Base:
    """`merge`: the bases that a merge can be made onto, none where all weights are trained; `refusal`: why it is not trained at all."""

    merge: tuple[str, ...] = ()
    refusal: Refusal | None = None


# Suffixes under which quantised copies of a model are published.
_COPY = re.compile(
    r"[-_.](gguf|gptq(-int[348])?|awq(-int4)?|fp8(-dynamic)?|(unsloth-)?bnb-4bit|int[48]|w[48]a(8|16)|mxfp4|exl[23]|mlx(-[348]bit)?)$", re.I
)
ORIGINAL_MODEL = "the 16-bit model that it was made from; its page on the hub names it"
_SIXTEEN = "[model] name = {original}"


def original_of(name: str) -> str:
    """ "org/name of the 16-bit model", with a guess where the name of a quantised copy tells it."""
    shorter = _COPY.sub("", _COPY.sub("", name.rstrip("/")))
    return ORIGINAL_MODEL if shorter == name.rstrip("/") else f"the 16-bit model that it was made from (perhaps {shorter})"


def _no(reason: str, edit: str) -> Base:
    return Base(refusal=Refusal(reason, edit))


_TWICE = "they would be quantised twice"
_FOREIGN = _no(
    "adapters on such weights cannot be trained the same on every machine, and cannot be merged",
    f'{_SIXTEEN}; kind = "qlora" quantises that one to 4 bits',
)
_ROUNDED = _no("it trains the weights themselves, but these are rounded", f'[method] kind = "lora" trains adapters on them; or {_SIXTEEN}')
CHECKPOINTS: dict[tuple[str, str], Base] = {
    (PLAIN, FULL): Base(),
    (PLAIN, LORA): Base((ORIGINAL,)),
    (PLAIN, LORA_8BIT): Base((ORIGINAL, DEQUANTISED)),
    (PLAIN, QLORA): Base((ORIGINAL, DEQUANTISED)),
    (BNB_4BIT, FULL): _ROUNDED,
    (BNB_4BIT, LORA): Base((DEQUANTISED,)),
    (BNB_4BIT, LORA_8BIT): _no(_TWICE, '[method] kind = "lora" without base keeps them as they are'),
    (BNB_4BIT, QLORA): Base((DEQUANTISED,)),
    (BNB_8BIT, FULL): _ROUNDED,
    (BNB_8BIT, LORA): Base((DEQUANTISED,)),
    (BNB_8BIT, LORA_8BIT): Base((DEQUANTISED,)),
    (BNB_8BIT, QLORA): _no(_TWICE, '[method] kind = "lora" keeps them as they are'),
    (WIDENED, FULL): Base(),
    (WIDENED, LORA): Base((ORIGINAL,)),
    (WIDENED, LORA_8BIT): _no(_TWICE, '[method] kind = "lora" without base trains adapters on them'),
    (WIDENED, QLORA): _no(_TWICE, '[method] kind = "lora" trains adapters on them'),
    **{(FOREIGN, method): _FOREIGN for method in METHODS},
}


def checkpoint_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """(how the files hold the weights, its name for a person), of a config.json."""
    stored = quantisation.stored_of(dict(config))
    return form_of(stored), stored.words if stored else PLAIN


def form_of(stored: Stored | None) -> str:
    """The checkpoint's row in the table."""
    if stored is None:
        return PLAIN
    if not stored.is_known:
        return FOREIGN
    return {quantisation.NF4: BNB_4BIT, quantisation.INT8: BNB_8BIT}.get(stored.held or "", WIDENED)


def method_of(kind: str, base: str) -> str:
    """The method's row in the table, of [method] kind and base."""
    return LORA_8BIT if kind == LORA and base == "8bit" else kind


def checkpoint_refusal(stored: Stored | None, kind: str, base: str, original: str = ORIGINAL_MODEL) -> Refusal | None:
    """Why files that are quantised so cannot be trained by this method; None where they can. `original`: in which words to name the model in 16 bits."""
    refusal = CHECKPOINTS[form_of(stored), method_of(kind, base)].refusal
    if refusal is None or stored is None:
        return None
    asked = 'base = "8bit"' if method_of(kind, base) == LORA_8BIT else f'kind = "{kind}"'
    reason = (
        f"the weights of this model are quantised already ({stored.words}), and [method] {asked} does not work with that: {refusal.reason}"
    )
    return Refusal(reason, refusal.edit.format(original=original))


# What an adapter is put on.
LINEAR, TRANSPOSED, EXPERTS, MATRIX = "a linear layer", "a transposed linear layer", "the experts of a layer", "a matrix parameter"
EMBEDDING = "the embeddings"
TIED_EMBEDDING = "the embeddings that are also the head"
HEAD = "the head"
TIED_HEAD = "the head that is also the embeddings"
CONVOLUTION, ATTENTION = "a convolution", "torch's own attention"
OWN_LINEAR, OWN_EMBEDDING = "a linear layer with its own computation", "embeddings with their own computation"
UNKNOWN = "a kind of layer that homelab does not know"
FIXED_HEAD = "a head and embeddings that share one tensor"
SHARED = "a weight of several layers"

ENDS = ("lm_head", "embed_tokens")  # how most models name head and embeddings
ADDED, UNTIED = "added", "untied"  # untied: head and embeddings become two tensors, and config.json says so


@dataclass(frozen=True)
class ModelPart:
    """`merge`: how adapters on it go into the base, None where they are not trained; `why_not`: then why."""

    merge: str | None
    why_not: str = ""


_STRANGE = "an adapter does not know what this class computes"
PARTS: dict[str, ModelPart] = {
    LINEAR: ModelPart(ADDED),
    TRANSPOSED: ModelPart(ADDED),
    EXPERTS: ModelPart(ADDED),
    MATRIX: ModelPart(ADDED),
    EMBEDDING: ModelPart(ADDED),
    HEAD: ModelPart(ADDED),
    TIED_EMBEDDING: ModelPart(UNTIED),
    TIED_HEAD: ModelPart(UNTIED),
    FIXED_HEAD: ModelPart(None, "a merge needs separate weights for the head, and its class cannot have them"),
    SHARED: ModelPart(None, "other layers share this weight, and a merge would change them, too"),
    CONVOLUTION: ModelPart(None, "an adapter on a convolution cannot be merged"),
    ATTENTION: ModelPart(None, "an adapter on it cannot be merged"),
    OWN_LINEAR: ModelPart(None, _STRANGE),
    OWN_EMBEDDING: ModelPart(None, _STRANGE),
    UNKNOWN: ModelPart(None, "it is not known how such an adapter is merged"),
}


def part_refusal(part: str, name: str, class_name: str, well: Sequence[str]) -> Refusal | None:
    """Why no adapter is trained on a layer `name` of this kind; None where one is. `well`: last parts of the names of layers where one may be."""
    if PARTS[part].merge is not None:
        return None
    targets = ", ".join(f'"{each}"' for each in well)
    edit = f"[method] targets = [{targets}]" if well else 'name other layers in [method] targets, or train all weights: kind = "full"'
    return Refusal(f"[method] targets reaches {name}, {part} ({class_name}): {PARTS[part].why_not}", edit)


def gguf_refusal(class_name: str, *, is_untied: bool = False) -> Refusal | None:
    """Why the tested converter of llama.cpp makes no (right) GGUF file of a model of this class; None where it does.

    `is_untied`: a merge separates head and embeddings (`UNTIED`).
    """
    if class_name not in gguf_classes.KNOWN:
        return Refusal(
            f"llama.cpp's converter does not know {class_name}",
            "serve it with vLLM (`homelab fetch --merged`), or give a newer converter: homelab gguf --llama-cpp DIR",
        )
    if is_untied and class_name in gguf_classes.WITHOUT_A_HEAD:
        return Refusal(
            f"a GGUF file of {class_name} has no separate head, but adapters on head or embeddings need one",
            "leave lm_head and embed_tokens out of [method] targets, or serve it with vLLM (`homelab fetch --merged`)",
        )
    return None
