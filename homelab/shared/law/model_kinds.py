"""The kinds of models that are not trained, by the model_type of their config.json: encoders, those with an encoder, those without a language head alone. Pure.

transformers has the last word on a node (`homelab.worker.model.base_kind`, in the same words); the tests compare these lists with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.shared.law.usable import Refusal
from homelab.shared.protocol import model_forms

DECODER = f"edit the recipe: {model_forms.HELD[model_forms.SENTENCES][1]}"
# With is_decoder in config.json some of them are trained.
ENCODERS = frozenset(
    (
        "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert", "electra", "ernie", "esm", "eurobert",
        "flaubert", "fnet", "funnel", "gte", "ibert", "layoutlm", "longformer", "luke", "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert",
        "nystromformer", "perceiver", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
        "yoso",
    )
)  # fmt: skip
WITH_ENCODER = frozenset(
    (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "mvp",
        "nllb-moe", "pegasus", "pegasus_x", "plbart", "prophetnet", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma", "umt5", "whisper",
    )
)  # fmt: skip
# They read images or sounds beside texts, and transformers builds them in another way than a language model.
WITH_IMAGES = frozenset(
    (
        "aria", "aya_vision", "blip", "blip-2", "chameleon", "cohere2_vision", "deepseek_vl", "florence2", "glm4v", "glm4v_moe", "idefics", "idefics2", "idefics3",
        "instructblip", "internvl", "janus", "kosmos-2", "lfm2_vl", "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "ovis2", "paligemma",
        "pix2struct", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "udop", "video_llava", "vipllava",
        "voxtral",
    )
)  # fmt: skip


def with_encoder(name: str) -> str:
    """What is wrong with a model that has both."""
    return f"{name} reads with an encoder and writes with a decoder; homelab trains only decoders"


def encoder(name: str) -> str:
    """What is wrong with an encoder."""
    return f"{name} is an encoder: it sees the words that it would have to predict"


def no_language_model(name: str, kind: str) -> str:
    """What is wrong with anything else that is not built as a causal language model."""
    return f"{name} is not a causal language model that transformers can build (type {kind})"


def refusal(config: Mapping[str, Any]) -> Refusal | None:
    """Why the model of this config.json is not trained, as far as its kind tells; None where it may be."""
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str):
        return None
    is_named = isinstance(classes, list) and bool(classes) and isinstance(classes[0], str)
    name = classes[0][:80] if is_named and isinstance(classes, list) else f"a model of type {kind}"
    if config.get("is_encoder_decoder") is True or kind in WITH_ENCODER:
        return Refusal(with_encoder(name), DECODER)
    if kind in ENCODERS and config.get("is_decoder") is not True:
        return Refusal(encoder(name), DECODER)
    return Refusal(no_language_model(name, kind), DECODER) if kind in WITH_IMAGES else None
